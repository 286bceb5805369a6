"""Header blocks as a session receives them: pieces into blocks, blocks into requests, responses, trailers.

A block is decoded whatever becomes of it, for HPACK's state belongs to the connection. A list that is
malformed costs its stream, and not the connection with all its tunnels (RFC 9113 section 8.1.1).
"""

from __future__ import annotations

from shared.http2 import frames
from shared.http2.events import (
    InterimReceived,
    RequestMalformed,
    RequestReceived,
    ResponseReceived,
    TrailersReceived,
)
from shared.http2.faults import Faults
from shared.http2.flood_guard import FloodGuard
from shared.http2.frame_rules import SessionError, field_block
from shared.http2.goaway import GoAway, GoAwayState
from shared.http2.header_decoder import HeaderDecoder
from shared.http2.header_rules import HeaderBlock, Shape
from shared.http2.output import Output
from shared.http2.past_streams import End
from shared.http2.session_limits import SessionLimits
from shared.http2.session_stream import Awaited, SessionStream
from shared.http2.streams import Streams

READABLE_LISTS = 2
"""Times the announced header list that is decoded: HPACK's state is lost with a list that is not, and with it
the connection and all its tunnels."""

FRAMES_OF_A_BLOCK = 64
"""HEADERS and its CONTINUATIONs: the flood guard bounds their bytes, this the empty ones."""

FREE_FIELDS = 100
"""Fields that a request may have for nothing; Envoy accepts no more at all."""

FIELDS_PER_STREAM = 20
"""Fields beyond those that cost us as much as a stream opened in vain: 2.5 µs each to decode and to judge."""


_REQUEST, _RESPONSE, _TRAILERS = Shape.REQUEST, Shape.RESPONSE, Shape.TRAILERS
_FINAL = GoAwayState.FINAL


class HeaderReceiver:
    """Header blocks of a connection."""

    def __init__(
        self,
        output: Output,
        streams: Streams,
        goaway: GoAway,
        faults: Faults,
        guard: FloodGuard,
        *,
        client: bool,
        limits: SessionLimits,
    ) -> None:
        self._output = output
        self._streams = streams
        self._goaway = goaway
        self._faults = faults
        self._guard = guard
        self._client = client
        self._max_streams = limits.max_streams
        self._decoder = HeaderDecoder(limits.max_header_list_bytes * READABLE_LISTS)
        self.block_stream = 0
        """The stream of the header block that has begun and not ended, within which nothing but its
        CONTINUATIONs may come (RFC 9113 section 4.3); 0: none."""
        self._pieces: list[bytes] = []  # of that block
        self._ends = False  # its HEADERS has END_STREAM

    # Pieces.

    def headers(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """A HEADERS frame."""
        if flags & (frames.FLAG_PADDED | frames.FLAG_PRIORITY):
            payload = field_block(flags, stream_id, payload)
        ends = bool(flags & frames.FLAG_END_STREAM)
        if flags & frames.FLAG_END_HEADERS:
            self._block(stream_id, bytes(payload), ends)
            return
        self.block_stream = stream_id
        self._pieces = [bytes(payload)]
        self._ends = ends

    def continuation(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """A CONTINUATION frame (RFC 9113 section 6.10)."""
        if not self.block_stream:
            raise SessionError("CONTINUATION of nothing", frames.PROTOCOL_ERROR)
        if stream_id != self.block_stream:
            raise SessionError("CONTINUATION of another stream's header block", frames.PROTOCOL_ERROR)
        self._pieces.append(bytes(payload))
        if len(self._pieces) > FRAMES_OF_A_BLOCK:
            text = f"a header block of more than {FRAMES_OF_A_BLOCK} frames"
            raise SessionError(text, frames.PROTOCOL_ERROR)
        if flags & frames.FLAG_END_HEADERS:
            whole = b"".join(self._pieces)
            self.block_stream = 0
            self._pieces = []
            self._block(stream_id, whole, self._ends)

    # Blocks.

    def _block(self, stream_id: int, block: bytes, ends: bool) -> None:
        headers = self._decoder.decode(block)
        streams = self._streams
        stream = streams.open.get(stream_id)
        if stream is None:
            if not self._client and stream_id > streams.newest and stream_id & 1:
                self._request(stream_id, headers, ends)
            else:
                self._unwanted(stream_id)
        elif not stream.state.receives:
            self._faults.stream_error(stream, frames.STREAM_CLOSED)
        elif stream.awaited.is_response:
            self._response(stream, headers, ends)
        else:
            self._trailers(stream, headers, ends)

    def _request(self, stream_id: int, headers: HeaderBlock, ends: bool) -> None:
        streams = self._streams
        streams.newest = stream_id
        count = len(headers.fields)
        if count > FREE_FIELDS:  # a byte each on the wire and much work
            self._faults.stream_wasted(refused=True, units=(count - FREE_FIELDS) / FIELDS_PER_STREAM)
        if len(streams.open) >= self._max_streams or self._goaway.state is _FINAL:
            streams.refuse(stream_id, frames.REFUSED_STREAM)
            self._faults.stream_wasted(refused=True)
        elif headers.shape is not _REQUEST:
            streams.refuse(stream_id, frames.PROTOCOL_ERROR)
            fault = headers.fault or f"the headers of a {headers.shape.value}"
            self._output.events.append(RequestMalformed(stream_id, fault))
            self._faults.stream_wasted()
        else:
            stream = streams.add(stream_id)
            if headers.content_length is not None:
                stream.await_body(headers.content_length)
            self._output.events.append(RequestReceived(stream, headers.fields, ends))
            if ends:
                self._end_of_body(stream)

    def _response(self, stream: SessionStream, headers: HeaderBlock, ends: bool) -> None:
        interim = headers.status.startswith(b"1")
        if headers.shape is not _RESPONSE or (interim and ends):
            fault = headers.fault or ("an interim answer that ends" if interim else "no :status")
            self._faults.stream_error(stream, frames.PROTOCOL_ERROR, fault)
            return
        if interim:
            self._guard.stale()  # few answers have one, and none has many
            self._output.events.append(InterimReceived(stream, headers.fields))
            return
        stream.response_came(headers.status, headers.content_length)
        self._output.events.append(ResponseReceived(stream, headers.fields, ends))
        if ends:
            self._end_of_body(stream)

    def _trailers(self, stream: SessionStream, headers: HeaderBlock, ends: bool) -> None:
        if headers.shape is not _TRAILERS or not ends:
            fault = headers.fault or "trailers that are none, or do not end the stream"
            self._faults.stream_error(stream, frames.PROTOCOL_ERROR, fault)
            return
        self._output.events.append(TrailersReceived(stream, headers.fields))
        self._end_of_body(stream)

    def _end_of_body(self, stream: SessionStream) -> None:
        """END_STREAM has come with headers."""
        if stream.awaited is Awaited.COUNTED_BODY and stream.body_left:
            self._faults.stream_error(stream, frames.PROTOCOL_ERROR)
        else:
            self._streams.end_remote(stream)

    def _unwanted(self, stream_id: int) -> None:
        """HEADERS on no open stream, nor for a new one (RFC 9113 section 5.1). On one that is over they are
        counted, unless they may have crossed the end of it, as a server's answer does whenever a tunnel's
        client leaves early."""
        if self._streams.is_idle(stream_id):
            raise SessionError("the peer opened a stream that is not its to open", frames.PROTOCOL_ERROR)
        end = self._streams.past.end_of(stream_id)
        if self._client and End.RESET_HERE in end:
            return
        if self._client:
            self._guard.stale()
        else:
            self._faults.stream_wasted(refused=True)  # as much work as a request that has to be refused
        if End.ENDED in end:
            raise SessionError("HEADERS on a stream that both have ended", frames.STREAM_CLOSED)
        if not end:
            raise SessionError("the numbers of streams do not rise", frames.PROTOCOL_ERROR)
        if End.RESET_BY_PEER in end:
            self._output.send(frames.rst_stream(stream_id, frames.STREAM_CLOSED))

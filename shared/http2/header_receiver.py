"""Header blocks as a session receives them: requests, answers, trailers, and streams that may not have any.

Rules: a block is decoded whatever becomes of it, for HPACK's state is the connection's. A list that is
malformed costs its stream, and not the connection with all its tunnels (RFC 9113 section 8.1.1). `session.py`
stands on it.
"""

from __future__ import annotations

from shared.http2 import frames
from shared.http2.data_receiver import DataReceiver
from shared.http2.events import (
    InterimReceived,
    RequestMalformed,
    RequestReceived,
    ResponseReceived,
    TrailersReceived,
)
from shared.http2.frame_rules import SessionError, field_block
from shared.http2.header_decoder import HeaderDecoder
from shared.http2.header_rules import HeaderBlock, Shape
from shared.http2.session_limits import SessionLimits
from shared.http2.stream_state import (
    NO_ANSWER_TO_CONNECT_YET,
    NO_ANSWER_TO_HEAD_YET,
    NO_LENGTH,
    End,
    StreamState,
)
from shared.http2.stream_table import GoAway

READABLE_LISTS = 2
"""Times the announced header list that is decoded: HPACK's state is lost with a list that is not, and with it
the connection and all its tunnels."""

FRAMES_OF_A_BLOCK = 64
"""HEADERS and its CONTINUATIONs: the flood guard bounds their bytes, this the empty ones."""

FREE_FIELDS = 100
"""Fields that a request may have for nothing; Envoy takes no more at all."""

FIELDS_PER_STREAM = 20
"""Fields beyond those that cost us as much as a stream opened in vain: 2.5 µs each to decode and to judge."""

STATUS_WITHOUT_BODY = (b"204", b"304")
"""Their content-length tells of another response's body (RFC 9110 section 8.6)."""


class HeaderReceiver(DataReceiver):
    """Header blocks of a connection."""

    __slots__ = ("_block_ends", "_block_stream", "_decoder", "_pieces")

    def __init__(self, *, client: bool, limits: SessionLimits | None = None) -> None:
        super().__init__(client=client, limits=limits)
        self._decoder = HeaderDecoder(self.limits.max_header_list_bytes * READABLE_LISTS)
        self._pieces: list[bytes] = []  # of the block that we are inside of
        self._block_stream = 0
        self._block_ends = False  # its HEADERS has END_STREAM

    def _headers_frame(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if flags & (frames.FLAG_PADDED | frames.FLAG_PRIORITY):
            payload = field_block(flags, stream_id, payload)
        ends = bool(flags & frames.FLAG_END_STREAM)
        if flags & frames.FLAG_END_HEADERS:
            self._block(stream_id, bytes(payload), ends)
            return
        self._in_headers = True
        self._pieces = [bytes(payload)]
        self._block_stream = stream_id
        self._block_ends = ends

    def _continuation(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """CONTINUATION, in its place (RFC 9113 section 6.10)."""
        if stream_id != self._block_stream:
            raise SessionError("CONTINUATION of another stream's header block", frames.PROTOCOL_ERROR)
        self._pieces.append(bytes(payload))
        if len(self._pieces) > FRAMES_OF_A_BLOCK:
            text = f"a header block of more than {FRAMES_OF_A_BLOCK} frames"
            raise SessionError(text, frames.PROTOCOL_ERROR)
        if flags & frames.FLAG_END_HEADERS:
            whole = b"".join(self._pieces)
            self._in_headers = False
            self._pieces = []
            self._block(stream_id, whole, self._block_ends)

    def _block(self, stream_id: int, block: bytes, ends: bool) -> None:
        headers = self._decoder.decode(block)
        stream = self.streams.get(stream_id)
        if stream is None:
            if not self.client and stream_id > self._newest and stream_id & 1:
                self._request(stream_id, headers, ends)
            else:
                self._unwanted_headers(stream_id)
        elif stream.remote_ended:
            self._stream_error(stream, frames.STREAM_CLOSED)
        elif stream.body_left < NO_LENGTH:
            self._response(stream, headers, ends)
        else:
            self._trailers(stream, headers, ends)

    def _request(self, stream_id: int, headers: HeaderBlock, ends: bool) -> None:
        self._newest = stream_id
        count = len(headers.fields)
        if count > FREE_FIELDS:  # a byte each on the wire and much work
            self._stream_wasted(refused=True, units=(count - FREE_FIELDS) / FIELDS_PER_STREAM)
        if len(self.streams) >= self.limits.max_streams or self.goaway_said is GoAway.FINAL:
            self._refuse(stream_id, frames.REFUSED_STREAM)
            self._stream_wasted(refused=True)
        elif headers.shape is not Shape.REQUEST:
            self._refuse(stream_id, frames.PROTOCOL_ERROR)
            fault = headers.fault or f"the headers of a {headers.shape.value}"
            self._events.append(RequestMalformed(stream_id, fault))
            self._stream_wasted()
        else:
            stream = self._add_stream(stream_id)
            stream.body_left = headers.content_length
            self._events.append(RequestReceived(stream, headers.fields, ends))
            if ends:
                self._end_of_body(stream)

    def _response(self, stream: StreamState, headers: HeaderBlock, ends: bool) -> None:
        interim = headers.status.startswith(b"1")
        if headers.shape is not Shape.RESPONSE or (interim and ends):
            fault = headers.fault or ("an interim answer that ends" if interim else "no :status")
            self._stream_error(stream, frames.PROTOCOL_ERROR, fault)
            return
        if interim:
            self._guard.stale(self._now)  # few answers have one, and none has many
            self._events.append(InterimReceived(stream, headers.fields))
            return
        awaited, stream.body_left = stream.body_left, headers.content_length
        if awaited == NO_ANSWER_TO_CONNECT_YET or headers.status in STATUS_WITHOUT_BODY:
            stream.body_left = NO_LENGTH  # a tunnel's is to be ignored (RFC 9110 section 9.3.6)
        elif awaited == NO_ANSWER_TO_HEAD_YET:
            stream.body_left = 0
        self._events.append(ResponseReceived(stream, headers.fields, ends))
        if ends:
            self._end_of_body(stream)

    def _trailers(self, stream: StreamState, headers: HeaderBlock, ends: bool) -> None:
        if headers.shape is not Shape.TRAILERS or not ends:
            fault = headers.fault or "trailers that are none, or do not end the stream"
            self._stream_error(stream, frames.PROTOCOL_ERROR, fault)
            return
        self._events.append(TrailersReceived(stream, headers.fields))
        self._end_of_body(stream)

    def _end_of_body(self, stream: StreamState) -> None:
        """END_STREAM has come with headers."""
        if stream.body_left > 0:
            self._stream_error(stream, frames.PROTOCOL_ERROR)
        else:
            self._remote_end(stream)

    def _unwanted_headers(self, stream_id: int) -> None:
        """HEADERS on no open stream, nor for a new one (RFC 9113 section 5.1). On one that is over they are
        counted, unless they may have crossed the end of it, as a server's answer does whenever a tunnel's
        client leaves early."""
        if self._is_idle(stream_id):
            raise SessionError("the peer opened a stream that is not its to open", frames.PROTOCOL_ERROR)
        end = self._past.end_of(stream_id)
        if self.client and End.RESET_HERE in end:
            return
        if self.client:
            self._guard.stale(self._now)
        else:
            self._stream_wasted(refused=True)  # as much work as a request that has to be refused
        if End.ENDED in end:
            raise SessionError("HEADERS on a stream that both have ended", frames.STREAM_CLOSED)
        if not end:
            raise SessionError("the numbers of streams do not rise", frames.PROTOCOL_ERROR)
        if End.RESET_BY_PEER in end:
            self._out += frames.rst_stream(stream_id, frames.STREAM_CLOSED)

"""One HTTP/2 connection as bytes in, events and bytes out (RFC 9113).

The rules:

1. The owner calls `receive_data`, then takes `events()`, then writes `data_to_send()` to the network. Every
   method that sends only appends to what `data_to_send` returns next, in the order of the calls.
2. Flow control is ours alone, both ways. Bytes received count as held until the owner calls `consumed`.
3. After GOAWAY, in either direction, open streams go on. A server says it in two steps (`announce_goaway`),
   so that no stream is lost that was on its way; in one (`goaway`) only to a peer that is at fault.
4. A fault on a stream costs the stream, as far as RFC 9113 allows; a fault of the connection costs the
   connection with all its tunnels. So does a flood (`FloodGuard`).
5. A peer that opens too many streams in vain is first given notice, if it may be a front end that passes on
   what others do (`FloodLimits.front_end`): GOAWAY, after which open streams go on and new ones are refused.
6. A connection error raises `SessionError` from `receive_data` once. The events up to it can still be taken,
   GOAWAY is in `data_to_send`, and all that is left to do is to write that and close. Whatever is sent
   afterwards is dropped.

`Session` is what the owner calls, and sends. Its parts, each of which knows only those above it:

    Output           frames to send and events to tell
    Windows          flow control, both ways, of streams and connection
    Streams          which are open, how each ends; GoAway: how the connection does
    Faults           what the peer's faults cost
    HeaderReceiver, DataReceiver, FrameReceiver
    FrameScanner     finds the frames and gives them to these three
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shared.http2 import frames
from shared.http2.data_receiver import DataReceiver
from shared.http2.events import Event, Headers
from shared.http2.faults import Faults
from shared.http2.flood_guard import FloodError, FloodGuard
from shared.http2.frame_receiver import FrameReceiver
from shared.http2.frame_rules import SessionError
from shared.http2.frame_scanner import FrameScanner
from shared.http2.goaway import GoAway, GoAwayState
from shared.http2.header_encoder import HeaderEncoder
from shared.http2.header_receiver import HeaderReceiver
from shared.http2.output import Output
from shared.http2.peer_settings import PeerSettings
from shared.http2.session_limits import SessionLimits
from shared.http2.session_stream import SessionStream
from shared.http2.streams import Streams
from shared.http2.window_growth import PROCESS, WindowGrowth
from shared.http2.windows import Windows

__all__ = ["GoAwayState", "Session", "SessionError", "SessionLimits", "SessionStream"]

DATA_BYTES = 16384 - frames.HEADER_BYTES
"""Payload of the DATA frames that we write: with its header a frame fills one TLS record (16 KiB)."""

STREAMS_BEFORE_SETTINGS = 100
"""Streams that a client opens before it knows the peer's limit: the least that RFC 9113 recommends to
allow, and what Google's front ends do allow."""

_header = frames.SHORT_HEADER.pack


class Session:
    """One end of an HTTP/2 connection; see the module's rules."""

    __slots__ = (
        "_data",
        "_encoder",
        "_faults",
        "_goaway",
        "_guard",
        "_output",
        "_peer",
        "_scanner",
        "_streams",
        "_windows",
        "client",
        "consumed",
        "heard_at",
        "limits",
        "streams",
    )

    def __init__(
        self,
        *,
        client: bool,
        limits: SessionLimits | None = None,
        growth: WindowGrowth = PROCESS,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`growth` bounds how far windows grow, together with those of other connections; `clock` is a steady
        one, in seconds. One that stands still keeps windows as they begin."""
        self.client = client
        self.limits = limits = limits or SessionLimits()
        self.heard_at = 0.0
        """The `now` of the last `receive_data`; 0 before the first."""
        self._output = output = Output(limits.announcement(client=client))
        self._windows = windows = Windows(
            output,
            connection_bytes=limits.connection_window_bytes,
            stream_bytes=limits.stream_window_bytes,
            most_stream_bytes=limits.most_stream_window_bytes,
            generous=client,
            growth=growth,
            clock=clock,
        )
        self._peer = peer = PeerSettings()
        self._guard = guard = FloodGuard(limits.floods)
        self._streams = streams = Streams(output, windows, peer, window_bytes=limits.stream_window_bytes)
        self.streams: Mapping[int, SessionStream] = streams.open
        """The open streams by number."""
        self._goaway = goaway = GoAway(output, streams, client=client)
        self._faults = faults = Faults(
            output, streams, goaway, guard, client=client, shared_peer=limits.floods.front_end
        )
        self._encoder = encoder = HeaderEncoder()
        headers = HeaderReceiver(output, streams, goaway, faults, guard, client=client, limits=limits)
        self._data = DataReceiver(
            output, streams, windows, headers, faults, guard, peer, max_frame_bytes=limits.max_frame_bytes
        )
        self._scanner = FrameScanner(
            self._data,
            FrameReceiver(
                output, streams, windows, goaway, faults, guard, headers, peer, encoder, client=client
            ),
            headers,
            preface=not client,
            max_frame_bytes=limits.max_frame_bytes,
        )
        self.consumed: Callable[[SessionStream, int], None] = windows.consumed
        """`consumed(stream, count)`: the owner has passed on `count` bytes of the stream, so the peer may
        send as many more. The windows' own method: another call would cost 8 % of a read of one small
        frame."""

    # Bytes and events.

    def receive_data(self, data: bytes | bytearray | memoryview, now: float = 0.0) -> None:
        """Takes what the network delivered; `now` is the time in seconds of a steady clock, by which floods
        are told from honest use.

        Raises:
            SessionError: the connection is over (rule 6).
        """
        if self._output.broken:
            return
        self.heard_at = self._guard.now = now
        try:
            self._scanner.scan(memoryview(data), now)
        except SessionError as error:
            self._faults.end_connection(error)
            raise
        except FloodError as flood:
            too_much = SessionError(str(flood), frames.ENHANCE_YOUR_CALM)
            self._faults.end_connection(too_much)
            raise too_much from flood

    def events(self) -> list[Event]:
        """What happened since the last call."""
        output = self._output
        events, output.events = output.events, []
        return events

    def data_to_send(self) -> bytearray:
        """What must be written to the network since the last call; the caller may keep it."""
        output = self._output
        wire, output.wire = output.wire, bytearray()
        return wire

    @property
    def pending_bytes(self) -> int:
        """How many bytes `data_to_send` would return."""
        return len(self._output.wire)

    @property
    def unfinished_since(self) -> float | None:
        """When what has come of a frame or a header block should have been followed by the rest; None if
        nothing is unfinished, or only DATA, which may stop in the middle for as long as the network does."""
        return self._scanner.since

    def announced(self) -> None:
        """What the session has to send from its beginning goes to the network now: the peer's acknowledgement
        will tell how far away it is."""
        self._windows.announced()

    # The connection's state.

    @property
    def broken(self) -> bool:
        """There was a connection error: nothing can be sent any more."""
        return self._output.broken

    @property
    def peer_settings_seen(self) -> bool:
        """The peer's first SETTINGS have come."""
        return self._peer.seen

    @property
    def peer_settings(self) -> PeerSettings:
        """What the peer has announced; for looking at."""
        return self._peer

    @property
    def goaway_state(self) -> GoAwayState:
        """What we have told the peer of the connection's end."""
        return self._goaway.state

    @property
    def goaway_received(self) -> bool:
        """The peer has sent GOAWAY."""
        return self._goaway.received

    @property
    def send_window(self) -> int:
        """Bytes that we may send on the connection, over all streams."""
        return self._windows.send

    @property
    def exhausted(self) -> bool:
        """Whether a client has used up its stream numbers (RFC 9113 section 5.1.1)."""
        return self._streams.newest >= frames.MAX_STREAM_ID - 2

    @property
    def room(self) -> int:
        """How many more streams a client may open now."""
        if self.exhausted or self._goaway.received or self._output.broken:
            return 0
        if not self._peer.seen:
            return STREAMS_BEFORE_SETTINGS - len(self._streams.open)
        return self._peer.max_streams - len(self._streams.open)

    # Streams.

    def open_stream(self, headers: Headers, *, end_stream: bool = False) -> SessionStream:
        """Client: sends a request's headers. The caller has made sure that there is `room`."""
        streams = self._streams
        stream_id = streams.newest = streams.newest + 2
        self._output.wire += frames.headers(stream_id, self._encoder.encode(headers), end_stream=end_stream)
        stream = streams.add(stream_id)
        method = b""
        for name, value in headers:
            if name == b":method":
                method = value
                break
        stream.await_response(method)
        self._windows.began(stream)
        if end_stream:
            streams.end_local(stream)
        return stream

    def send_headers(self, stream: SessionStream, headers: Headers, *, end_stream: bool = False) -> None:
        """Server: sends response headers; both: trailers, with `end_stream`."""
        if stream.state.sends and not self._output.broken:
            stream.answered = True
            block = self._encoder.encode(headers)
            self._output.wire += frames.headers(stream.id, block, end_stream=end_stream)
            if end_stream:
                self._streams.end_local(stream)

    def send_interim(self, stream: SessionStream, headers: Headers) -> None:
        """Server: sends an interim response (1xx), of which there may be several before the final one."""
        if stream.state.sends and not self._output.broken:
            self._output.wire += frames.headers(stream.id, self._encoder.encode(headers), end_stream=False)

    def send_data(self, stream: SessionStream, data: bytes | bytearray | memoryview) -> int:
        """Frames as much of `data` as both windows allow and returns how many bytes that was. The rest is the
        caller's to keep. On a stream on which nothing can be sent all is dropped: nobody is left to read it.

        Counts both windows and writes frames inline: this is done for every read of a tunnel, and each call
        would cost 10 % of a write of a few bytes."""
        output, windows = self._output, self._windows
        size = allowed = len(data)
        if not stream.state.sends or output.broken:
            return size
        if allowed > stream.send_window:
            allowed = stream.send_window
        if allowed > windows.send:
            allowed = windows.send
        if allowed <= 0:
            return 0
        stream_id = stream.id
        if allowed <= DATA_BYTES:
            wire = output.wire
            wire += _header(allowed >> 8, allowed & 0xFF, frames.DATA, stream_id)
            wire += data if allowed == size else memoryview(data)[:allowed]
            self._guard.data_frames += 1
        else:
            view = memoryview(data)[:allowed]
            pieces: list[bytes | bytearray | memoryview] = [output.wire]
            for at in range(0, allowed, DATA_BYTES):
                chunk = view[at : at + DATA_BYTES]
                length = len(chunk)
                pieces.append(_header(length >> 8, length & 0xFF, frames.DATA, stream_id))
                pieces.append(chunk)
            output.wire = bytearray().join(pieces)  # room for all of it at once, instead of piece by piece
            self._guard.data_frames += 1 + allowed // DATA_BYTES
        stream.send_window -= allowed
        windows.send -= allowed
        return allowed

    def end_stream(self, stream: SessionStream) -> None:
        """Sends END_STREAM: nothing more will be sent on the stream."""
        if stream.state.sends and not self._output.broken:
            self._output.wire += frames.end_stream(stream.id)
            self._streams.end_local(stream)

    def reset(self, stream: SessionStream, code: int) -> None:
        """Sends RST_STREAM; the stream is over."""
        self._streams.reset(stream, code)

    def refused(self, last_stream_id: int) -> list[SessionStream]:
        """Client: the open streams that the peer has not processed, by its GOAWAY (RFC 9113 section 6.8)."""
        return [stream for stream in self._streams.open.values() if stream.id > last_stream_id]

    def break_off(self) -> list[SessionStream]:
        """The connection is lost: all streams are over, and nothing is sent. Returns those that were open."""
        return self._streams.break_off_all()

    # The connection.

    def ping(self, data: bytes) -> None:
        """Sends PING with these eight bytes; the peer answers at once (RFC 9113 section 6.7)."""
        self._output.send(frames.ping(data))

    def announce_goaway(self) -> None:
        """Sends the first of two GOAWAYs; the event `GoAwaySeen` tells when the peer has seen it. Then, or
        when that takes too long, the owner calls `goaway`. Of a client one GOAWAY says all."""
        self._goaway.announce()

    def goaway(self, code: int = frames.NO_ERROR) -> None:
        """Tells the peer the last stream that was accepted: no further one is, and open ones go on."""
        self._goaway.finish(code)

    def explain_notice(self) -> None:
        """Tells a peer that was given notice (rule 5) the reason, now that the last stream is over."""
        self._faults.explain_notice()

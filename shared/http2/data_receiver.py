"""DATA as a session receives it: on streams that may have it, and on others."""

from __future__ import annotations

from shared.http2 import frames
from shared.http2.events import DataReceived
from shared.http2.faults import Faults
from shared.http2.flood_guard import FloodGuard
from shared.http2.frame_rules import SessionError
from shared.http2.header_receiver import HeaderReceiver
from shared.http2.output import Output
from shared.http2.past_streams import End
from shared.http2.peer_settings import PeerSettings
from shared.http2.session_stream import Awaited, SessionStream
from shared.http2.streams import Streams
from shared.http2.windows import Windows

_HEADER_BYTES = frames.HEADER_BYTES
_unpack_from = frames.SHORT_HEADER.unpack_from

SMALL_BYTES = 1024
"""DATA frames up to this size that follow each other on a stream become one event: copying them together
costs less than the relay's write for each (0.4 µs a frame against 7)."""


_BODY = Awaited.BODY


class DataReceiver:
    """DATA of a connection (`frame_scanner.DataSink`)."""

    __slots__ = (
        "_ends",
        "_faults",
        "_guard",
        "_headers",
        "_max_frame_bytes",
        "_output",
        "_peer",
        "_streams",
        "_windows",
        "stream",
    )

    def __init__(
        self,
        output: Output,
        streams: Streams,
        windows: Windows,
        headers: HeaderReceiver,
        faults: Faults,
        guard: FloodGuard,
        peer: PeerSettings,
        *,
        max_frame_bytes: int,
    ) -> None:
        self._output = output
        self._streams = streams
        self._windows = windows
        self._headers = headers
        self._faults = faults
        self._guard = guard
        self._peer = peer
        self._max_frame_bytes = max_frame_bytes
        self.stream: SessionStream | None = None
        """Whose DATA frame has begun and not ended; None: there is none, or it is dropped."""
        self._ends = False  # that frame has END_STREAM

    def receive_plain_data(self, data: memoryview, at: int, length: int, stream_id: int) -> int:
        """The path of most DATA frames: whole, without flags, on streams that may receive any number of
        bytes; it reads as many frames as there are. Small ones that follow on the same stream are one event.

        Counts both windows inline: a call of `Windows.received` would cost 10 % of a frame of a few bytes."""
        if self._headers.block_stream:
            return 0
        begin, size, last = at, len(data), len(data) - _HEADER_BYTES
        largest, left = self._max_frame_bytes, self._windows.receive
        streams, events = self._streams.open, self._output.events
        while True:
            stream = streams.get(stream_id)
            if stream is None or stream.awaited is not _BODY:
                break
            allowed = stream.receive_window
            if allowed > left:
                allowed = left
            end = at + _HEADER_BYTES + length
            if not 0 < length <= allowed or length > largest or end > size:
                break
            payload = data[at + _HEADER_BYTES : end]
            at, taken, taken_of, small = end, length, stream_id, length <= SMALL_BYTES
            joined: bytearray | None = None
            kind_and_flags = 0
            while at <= last:
                high, low, kind_and_flags, stream_id = _unpack_from(data, at)
                length = high << 8 | low
                if stream_id != taken_of or not small or kind_and_flags or not 0 < length <= SMALL_BYTES:
                    break
                end = at + _HEADER_BYTES + length
                if end > size or taken + length > allowed:
                    break
                if joined is None:
                    joined = bytearray(payload)
                joined += data[at + _HEADER_BYTES : end]
                at, taken = end, taken + length
            stream.receive_window -= taken
            left -= taken
            stream.held += taken
            events.append(DataReceived(stream, payload if joined is None else memoryview(joined)))
            if kind_and_flags or at > last:
                break
        self._windows.receive = left
        return at if at > begin else 0

    def receive_data_head(self, length: int, flags: int, stream_id: int, padding: int) -> None:
        """Any other DATA frame; `padding` counts its length field too."""
        if not self._peer.seen:
            raise SessionError("the first frame is not SETTINGS", frames.PROTOCOL_ERROR)
        if self._headers.block_stream:
            raise SessionError("DATA within a header block", frames.PROTOCOL_ERROR)
        if not stream_id:
            raise SessionError("DATA on stream 0", frames.PROTOCOL_ERROR)
        payload = length - padding
        ends = bool(flags & frames.FLAG_END_STREAM)
        stream = self._streams.open.get(stream_id)
        fits = self._windows.received(stream, length)
        if stream is None or not stream.state.receives:
            self._unwanted(stream, stream_id)
        elif not fits:
            self._faults.stream_error(stream, frames.FLOW_CONTROL_ERROR)
        elif stream.awaited is not _BODY and not stream.count_body(payload, ends=ends):
            self._faults.stream_error(stream, frames.PROTOCOL_ERROR)
        elif padding:
            self._windows.held(stream, padding)
            self._windows.consumed(stream, padding)
        if stream is not None and stream.state.over:
            stream = None
        if stream is None and padding:
            self._windows.dropped(padding)
        self.stream = stream
        self._ends = ends
        if not payload and not ends:
            self._guard.empty_data()

    def receive_data(self, payload: memoryview) -> None:
        """Some of its payload."""
        stream = self.stream
        if stream is None or stream.state.over:
            self._windows.dropped(len(payload))
        else:
            self._windows.held(stream, len(payload))
            self._output.events.append(DataReceived(stream, payload))

    def receive_data_end(self) -> None:
        """It is over."""
        stream, self.stream = self.stream, None
        if self._ends and stream is not None and not stream.state.over:
            self._streams.end_remote(stream)

    def _unwanted(self, stream: SessionStream | None, stream_id: int) -> None:
        """DATA on a stream that may not receive (RFC 9113 section 5.1)."""
        if stream is not None:
            self._guard.stale()
            self._faults.stream_error(stream, frames.STREAM_CLOSED)
        elif self._streams.is_idle(stream_id):
            raise SessionError("DATA on an idle stream", frames.PROTOCOL_ERROR)
        elif End.RESET_HERE not in self._streams.past.end_of(stream_id):
            self._guard.stale()
            self._output.send(frames.rst_stream(stream_id, frames.STREAM_CLOSED))
        # Else it was on its way before the peer saw our RST_STREAM (RFC 9113 section 5.4.2).

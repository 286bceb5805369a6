"""DATA as a session receives it: windows, content-length, and streams that may not receive any.

Rules: bytes count as held until the owner calls `consumed`; DATA on a stream that may not have it is
discarded and credited as it comes, so that the connection's window stays true. `header_receiver.py` stands on
it.
"""

from __future__ import annotations

from shared.http2 import frames
from shared.http2.events import DataReceived
from shared.http2.frame_rules import SessionError
from shared.http2.session_limits import SessionLimits
from shared.http2.stream_sender import StreamSender
from shared.http2.stream_state import NO_LENGTH, End, StreamState

_HEADER_BYTES = frames.HEADER_BYTES
_unpack_from = frames.SHORT_HEADER.unpack_from

SMALL_BYTES = 1024
"""DATA frames up to this size that follow each other on a stream become one event: copying them together
costs less than the relay's write for each (0.4 µs a frame against 7)."""


class DataReceiver(StreamSender):
    """DATA of a connection."""

    __slots__ = ("_data_ends", "_data_stream", "_in_headers")

    def __init__(self, *, client: bool, limits: SessionLimits | None = None) -> None:
        super().__init__(client=client, limits=limits)
        self._in_headers = False  # between HEADERS and its last CONTINUATION: nothing else may come
        self._data_stream: StreamState | None = None  # whose DATA frame we are inside of; None: discard it
        self._data_ends = False  # it has END_STREAM

    # What the scanner tells.

    def take_plain_data(self, data: memoryview, at: int, length: int, stream_id: int) -> int:
        """The way of most DATA frames: whole, without flags, on streams that may receive them; as many as
        there are. Small ones that follow on the same stream go with it."""
        if self._in_headers:
            return 0
        begin, size, last = at, len(data), len(data) - _HEADER_BYTES
        largest = self.limits.max_frame_bytes
        streams, events = self.streams, self._events
        while True:
            stream = streams.get(stream_id)
            if stream is None or stream.remote_ended or stream.body_left != NO_LENGTH:
                break
            # `min(stream.receive_window, self._receive_window)`, but for the call.
            allowed = stream.receive_window
            if allowed > self._receive_window:
                allowed = self._receive_window
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
            self._receive_window -= taken
            stream.held += taken
            events.append(DataReceived(stream, payload if joined is None else memoryview(joined)))
            if kind_and_flags or at > last:
                break
        return at if at > begin else 0

    def take_data_head(self, length: int, flags: int, stream_id: int, padding: int) -> None:
        """Any other DATA frame; `padding` counts its length field too."""
        if not self.peer_settings_seen:
            raise SessionError("the first frame is not SETTINGS", frames.PROTOCOL_ERROR)
        if self._in_headers:
            raise SessionError("DATA within a header block", frames.PROTOCOL_ERROR)
        if not stream_id:
            raise SessionError("DATA on stream 0", frames.PROTOCOL_ERROR)
        self._receive_window -= length
        if self._receive_window < 0:
            raise SessionError("the peer sent beyond the connection's window", frames.FLOW_CONTROL_ERROR)
        payload = length - padding
        ends = bool(flags & frames.FLAG_END_STREAM)
        stream = self.streams.get(stream_id)
        if stream is None or stream.remote_ended:
            self._unwanted_data(stream, stream_id)
            stream = None
        else:
            stream.receive_window -= length
            if stream.receive_window < 0:
                self._stream_error(stream, frames.FLOW_CONTROL_ERROR)
            elif not stream.takes(payload, ends=ends):
                self._stream_error(stream, frames.PROTOCOL_ERROR)
            elif padding:
                stream.held += padding
                self.consumed(stream, padding)
            if stream.over:
                stream = None
        if stream is None and padding:
            self._return_credit(padding)
        self._data_stream = stream
        self._data_ends = ends
        if not payload and not ends:
            self._guard.empty_data(self._now)

    def take_data(self, payload: memoryview) -> None:
        """Some of its payload."""
        stream = self._data_stream
        if stream is None or stream.over:
            self._return_credit(len(payload))
        else:
            stream.held += len(payload)
            self._events.append(DataReceived(stream, payload))

    def take_data_end(self) -> None:
        """It is over."""
        stream = self._data_stream
        self._data_stream = None
        if self._data_ends and stream is not None and not stream.over:
            self._remote_end(stream)

    def _unwanted_data(self, stream: StreamState | None, stream_id: int) -> None:
        """DATA on a stream that may not receive (RFC 9113 section 5.1)."""
        if stream is not None:
            self._guard.stale(self._now)
            self._stream_error(stream, frames.STREAM_CLOSED)
        elif self._is_idle(stream_id):
            raise SessionError("DATA on an idle stream", frames.PROTOCOL_ERROR)
        elif End.RESET_HERE not in self._past.end_of(stream_id):
            self._guard.stale(self._now)
            self._out += frames.rst_stream(stream_id, frames.STREAM_CLOSED)
        # Else it was on its way before the peer saw our RST_STREAM (RFC 9113 section 5.4.2).

"""What a session sends on its streams: headers, DATA within both windows, the end.

Rules: DATA is never sent beyond a window; what was not sent is the caller's to keep. On a stream that is
over, or that we have ended, everything is dropped: nobody is left to read it. `data_receiver.py` stands on
it.
"""

from __future__ import annotations

from shared.http2 import frames
from shared.http2.events import Headers
from shared.http2.header_encoder import HeaderEncoder
from shared.http2.session_limits import SessionLimits
from shared.http2.stream_state import (
    NO_ANSWER_TO_CONNECT_YET,
    NO_ANSWER_TO_HEAD_YET,
    NO_ANSWER_YET,
    StreamState,
)
from shared.http2.stream_table import StreamTable

DATA_BYTES = 16384 - frames.HEADER_BYTES
"""Payload of the DATA frames that we write: with its header a frame fills one TLS record (16 KiB)."""

STREAMS_BEFORE_SETTINGS = 100
"""Streams that a client opens before it knows the peer's limit: the least that RFC 9113 recommends to
allow, and what Google's front ends do allow."""

_header = frames.SHORT_HEADER.pack

_AWAITED = {b"HEAD": NO_ANSWER_TO_HEAD_YET, b"CONNECT": NO_ANSWER_TO_CONNECT_YET}
"""What an answer's content-length will mean, by the request's method."""


class StreamSender(StreamTable):
    """The sending side of a connection's streams."""

    __slots__ = ("_encoder", "peer_settings_seen")

    def __init__(self, *, client: bool, limits: SessionLimits | None = None) -> None:
        super().__init__(client=client, limits=limits)
        self.peer_settings_seen = False
        self._encoder = HeaderEncoder()

    @property
    def exhausted(self) -> bool:
        """Whether a client has used up its stream numbers (RFC 9113 section 5.1.1)."""
        return self._newest >= frames.MAX_STREAM_ID - 2

    @property
    def room(self) -> int:
        """How many more streams a client may open now."""
        if self.exhausted or self.goaway_received or self.broken:
            return 0
        if not self.peer_settings_seen:
            return STREAMS_BEFORE_SETTINGS - len(self.streams)
        return self._peer.max_streams - len(self.streams)

    def open_stream(self, headers: Headers, *, end_stream: bool = False) -> StreamState:
        """Client: sends a request's headers. The caller has looked at `room`."""
        stream_id = self._newest = self._newest + 2
        self._out += frames.headers(stream_id, self._encoder.encode(headers), end_stream=end_stream)
        stream = self._add_stream(stream_id)
        stream.local_ended = end_stream
        method = next((value for name, value in headers if name == b":method"), b"")
        stream.body_left = _AWAITED.get(method, NO_ANSWER_YET)
        return stream

    def send_headers(self, stream: StreamState, headers: Headers, *, end_stream: bool = False) -> None:
        """Server: sends response headers; both: trailers, with `end_stream`."""
        if stream.over or stream.local_ended or self.broken:
            return
        stream.answered = True
        self._out += frames.headers(stream.id, self._encoder.encode(headers), end_stream=end_stream)
        if end_stream:
            self._local_end(stream)

    def send_interim(self, stream: StreamState, headers: Headers) -> None:
        """Server: sends an interim response (1xx), of which there may be several before the final one."""
        if not (stream.over or stream.local_ended or self.broken):
            self._out += frames.headers(stream.id, self._encoder.encode(headers), end_stream=False)

    def send_data(self, stream: StreamState, data: bytes | bytearray | memoryview) -> int:
        """Frames as much of `data` as both windows allow and returns how many bytes that was."""
        if stream.over or stream.local_ended or self.broken:
            return len(data)  # nobody is left to read it
        size = allowed = len(data)
        # `min`, but for the call; likewise `frames.header`: this is done for every read of a tunnel.
        if allowed > stream.send_window:
            allowed = stream.send_window
        if allowed > self.send_window:
            allowed = self.send_window
        if allowed <= 0:
            return 0
        stream_id = stream.id
        if allowed <= DATA_BYTES:
            out = self._out
            out += _header(allowed >> 8, allowed & 0xFF, frames.DATA, stream_id)
            out += data if allowed == size else memoryview(data)[:allowed]
            self._guard.data_frames += 1
        else:
            view = memoryview(data)
            pieces: list[bytes | bytearray | memoryview] = [self._out]
            for at in range(0, allowed, DATA_BYTES):
                chunk = view[at : min(at + DATA_BYTES, allowed)]
                pieces.append(frames.header(len(chunk), frames.DATA, 0, stream_id))
                pieces.append(chunk)
            self._out = bytearray().join(pieces)  # room for all of it at once, instead of piece by piece
            self._guard.data_frames += 1 + allowed // DATA_BYTES
        stream.send_window -= allowed
        self.send_window -= allowed
        return allowed

    def end_stream(self, stream: StreamState) -> None:
        """Sends END_STREAM: nothing more will be sent on the stream."""
        if stream.over or stream.local_ended or self.broken:
            return
        self._out += frames.end_stream(stream.id)
        self._local_end(stream)

    def ping(self, data: bytes) -> None:
        """Sends PING with these eight bytes; the peer answers at once (RFC 9113 section 6.7)."""
        if not self.broken:
            self._out += frames.ping(data)

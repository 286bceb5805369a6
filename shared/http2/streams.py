"""The streams of a connection: their numbers, which are open, how each ends."""

from __future__ import annotations

from shared.http2 import frames
from shared.http2.events import StreamEnded
from shared.http2.output import Output
from shared.http2.past_streams import ENDED, RESET_BY_PEER, RESET_HERE, PastStreams
from shared.http2.peer_settings import PeerSettings
from shared.http2.session_stream import Awaited, SessionStream, StreamState
from shared.http2.windows import Windows, part_of

_OPEN, _CLOSED = StreamState.OPEN, StreamState.CLOSED
_HALF_CLOSED_LOCAL, _HALF_CLOSED_REMOTE = StreamState.HALF_CLOSED_LOCAL, StreamState.HALF_CLOSED_REMOTE
_NOTHING = Awaited.NOTHING


class Streams:
    """All that a peer opens, or we open, have odd numbers: nobody pushes."""

    __slots__ = ("_output", "_part_bytes", "_peer", "_window_bytes", "_windows", "newest", "open", "past")

    def __init__(self, output: Output, windows: Windows, peer: PeerSettings, *, window_bytes: int) -> None:
        """`window_bytes` is what we have announced for new streams."""
        self._output = output
        self._windows = windows
        self._peer = peer
        self._window_bytes = window_bytes
        self._part_bytes = part_of(window_bytes)
        self.open: dict[int, SessionStream] = {}
        """By number; always the same dict."""
        self.past = PastStreams()
        self.newest = -1
        """The highest number that the client has used, be it we or the peer."""

    def is_idle(self, stream_id: int) -> bool:
        """Whether no such stream was opened, nor one with a higher number, which would have closed it (RFC
        9113 section 5.1.1)."""
        return stream_id > self.newest or not stream_id & 1

    def add(self, stream_id: int) -> SessionStream:
        """A new open stream."""
        stream = SessionStream(
            stream_id, self._peer.initial_window_bytes, self._window_bytes, self._part_bytes
        )
        self.open[stream_id] = stream
        return stream

    def end_local(self, stream: SessionStream) -> None:
        """END_STREAM was sent."""
        if stream.state is _OPEN:
            stream.state = _HALF_CLOSED_LOCAL
        else:
            self._ended(stream)

    def end_remote(self, stream: SessionStream) -> None:
        """END_STREAM has come."""
        stream.awaited = _NOTHING
        self._output.events.append(StreamEnded(stream))
        if stream.state is _OPEN:
            stream.state = _HALF_CLOSED_REMOTE
        else:
            self._ended(stream)

    def reset(self, stream: SessionStream, code: int) -> None:
        """Sends RST_STREAM, unless the stream is over already."""
        if not stream.state.over:
            self.refuse(stream.id, code)
            self._break_off(stream)

    def reset_by_peer(self, stream: SessionStream) -> None:
        """RST_STREAM has come."""
        self.past.remember(stream.id, RESET_BY_PEER)
        self._break_off(stream)

    def refuse(self, stream_id: int, code: int) -> None:
        """Sends RST_STREAM for a stream that has no record."""
        self._output.send(frames.rst_stream(stream_id, code))
        self.past.remember(stream_id, RESET_HERE)

    def break_off_all(self) -> list[SessionStream]:
        """The connection is lost: all streams are over, and nothing is sent. Returns those that were open."""
        streams = list(self.open.values())
        self.open.clear()
        for stream in streams:
            stream.state = StreamState.RESET
        self._windows.lost(streams)
        return streams

    def _ended(self, stream: SessionStream) -> None:
        stream.state = _CLOSED
        self.past.remember(stream.id, ENDED)
        del self.open[stream.id]
        if stream.held or stream.window > self._window_bytes:
            self._windows.released(stream)

    def _break_off(self, stream: SessionStream) -> None:
        stream.state = StreamState.RESET
        stream.awaited = _NOTHING
        del self.open[stream.id]
        if stream.held or stream.window > self._window_bytes:
            self._windows.released(stream)

"""The bottom of a session: its streams, how each ends, and what all of them share.

Owned here: which streams there are and were, their numbers, the session's output and events, the connection's
windows, GOAWAY, and the price of streams opened in vain. `stream_sender.py` stands on it.
"""

from __future__ import annotations

from enum import Enum

from shared.http2 import frames
from shared.http2.events import (
    Event,
    NoticeGiven,
    StreamEnded,
    StreamReset,
)
from shared.http2.flood_guard import FloodError, FloodGuard
from shared.http2.frame_rules import SessionError
from shared.http2.peer_settings import FIRST_WINDOW, PeerSettings
from shared.http2.session_limits import SessionLimits
from shared.http2.stream_state import PastStreams, StreamState

GOAWAY_PING = b"goaway\0\0"
"""In the PING behind the first of two GOAWAYs: its answer says that the peer has seen that GOAWAY. Our other
PINGs have something else in them."""


class GoAway(Enum):
    """What we have told the peer of the connection's end (RFC 9113 section 6.8)."""

    UNSAID = "unsaid"

    ANNOUNCED = "announced"
    """It is to open no new stream. Those that it opened before it knew are still taken."""

    FINAL = "final"
    """It knows the last stream that was taken; further ones are refused."""


class StreamTable:
    """The streams of a connection. All that a peer opens, or we open, have odd numbers: nobody pushes."""

    __slots__ = (
        "_credit",
        "_credit_mark",
        "_events",
        "_guard",
        "_last_taken",
        "_newest",
        "_notice_given",
        "_now",
        "_out",
        "_past",
        "_peer",
        "_receive_window",
        "_stream_credit_mark",
        "broken",
        "client",
        "goaway_received",
        "goaway_said",
        "limits",
        "send_window",
        "streams",
    )

    def __init__(self, *, client: bool, limits: SessionLimits | None = None) -> None:
        self.client = client
        self.limits = limits or SessionLimits()
        self.streams: dict[int, StreamState] = {}
        self.goaway_received = False
        self.goaway_said = GoAway.UNSAID
        self.broken = False  # a connection error: nothing can be sent any more
        self.send_window = FIRST_WINDOW
        self._receive_window = self.limits.connection_window_bytes
        self._credit = 0  # consumed bytes of the connection that we have not yet told the peer about
        # Half a window: often enough that a fast peer never waits, rare enough to cost nothing.
        self._credit_mark = (self.limits.connection_window_bytes + 1) // 2
        self._stream_credit_mark = (self.limits.stream_window_bytes + 1) // 2
        self._peer = PeerSettings()
        self._newest = -1  # the highest number that a client has used: ours, or the peer's
        self._past = PastStreams()
        self._last_taken: int | None = None  # what GOAWAY said: it may only fall (RFC 9113 section 6.8)
        self._notice_given = False
        self._guard = FloodGuard(self.limits.floods)
        self._now = 0.0
        self._events: list[Event] = []
        self._out = bytearray(self.limits.announcement(client=client))

    # What the owner does.

    def events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def data_to_send(self) -> bytearray:
        """What must be written to the network since the last call; the caller may keep it."""
        out, self._out = self._out, bytearray()
        return out

    @property
    def pending_bytes(self) -> int:
        """How many bytes `data_to_send` would return."""
        return len(self._out)

    def reset(self, stream: StreamState, code: int) -> None:
        """Sends RST_STREAM; the stream is over."""
        if stream.over:
            return
        if not self.broken:
            self._out += frames.rst_stream(stream.id, code)
        self._past.reset_here(stream.id)
        self._finish(stream)

    def consumed(self, stream: StreamState, count: int) -> None:
        """The owner has passed on `count` bytes of the stream, so the peer may send as many more."""
        if not stream.over:
            stream.held -= count
            if not stream.remote_ended:
                stream.credit += count
                if stream.credit >= self._stream_credit_mark and not self.broken:
                    self._out += frames.window_update(stream.id, stream.credit)
                    stream.receive_window += stream.credit
                    stream.credit = 0
            # `_return_credit`, but for the call: this is done for every read of every stream.
            self._credit += count
            if self._credit >= self._credit_mark:
                self._return_credit(0)

    def announce_goaway(self) -> None:
        """The first of two GOAWAYs, by which no stream is lost that is on its way: it names no last stream,
        and the PING behind it tells when the peer has seen it (`GoAwaySeen`). Then, or when that takes too
        long, the owner calls `goaway`. Of a client, whose peer opens no streams, one GOAWAY says all."""
        if self.client:
            self.goaway()
        elif self.goaway_said is GoAway.UNSAID:
            self.goaway_said = GoAway.ANNOUNCED
            self._out += frames.goaway(frames.MAX_STREAM_ID, frames.NO_ERROR) + frames.ping(GOAWAY_PING)

    def goaway(self, code: int = frames.NO_ERROR) -> None:
        """Tells the peer the last stream that was taken: no further one is, and open ones go on."""
        if self.goaway_said is not GoAway.FINAL:
            self.goaway_said = GoAway.FINAL
            self._say_goaway(code)

    def last_words(self) -> None:
        """Tells a peer that was given notice why, now that the last stream is over: some clients break open
        streams at a GOAWAY with an error."""
        if self._notice_given and not self.broken:
            self._notice_given = False
            self._say_goaway(frames.ENHANCE_YOUR_CALM)

    # How streams begin and end.

    def _is_idle(self, stream_id: int) -> bool:
        """Whether no such stream was opened, nor one with a higher number, which would have closed it (RFC
        9113 section 5.1.1)."""
        return stream_id > self._newest or not stream_id & 1

    def _add_stream(self, stream_id: int) -> StreamState:
        stream = StreamState(stream_id, self._peer.initial_window_bytes, self.limits.stream_window_bytes)
        self.streams[stream_id] = stream
        return stream

    def _local_end(self, stream: StreamState) -> None:
        stream.local_ended = True
        if stream.remote_ended:
            self._past.ended(stream.id)
            self._finish(stream)

    def _remote_end(self, stream: StreamState) -> None:
        stream.remote_ended = True
        self._events.append(StreamEnded(stream))
        if stream.local_ended:
            self._past.ended(stream.id)
            self._finish(stream)

    def _finish(self, stream: StreamState) -> None:
        stream.over = True
        self.streams.pop(stream.id, None)
        if stream.held:
            self._return_credit(stream.held)
            stream.held = 0

    def _refuse(self, stream_id: int, code: int) -> None:
        """Resets a stream that nobody has been told of."""
        self._out += frames.rst_stream(stream_id, code)
        self._past.reset_here(stream_id)

    def _stream_error(self, stream: StreamState, code: int, fault: str = "") -> None:
        self.reset(stream, code)
        self._events.append(StreamReset(stream, code, by_peer=False, fault=fault))
        if not self.client:
            self._stream_wasted()

    def _stream_wasted(self, *, refused: bool = False, units: float = 1.0) -> None:
        """A stream was opened in vain (rule 5 of the session). After notice only those count that were opened
        after it: the others are as many as were open."""
        spare = self.limits.floods.front_end
        if spare and self.goaway_said is GoAway.FINAL and not refused:
            return
        try:
            self._guard.stream_wasted(self._now, units)
        except FloodError:
            if not spare or self.goaway_said is GoAway.FINAL or not self.streams:
                raise
            self._guard.forgive_resets()
            self._notice_given = True
            self.goaway()
            self._events.append(NoticeGiven())

    # What belongs to the connection.

    def _return_credit(self, count: int) -> None:
        self._credit += count
        if self._credit >= self._credit_mark and not self.broken:
            self._out += frames.window_update(0, self._credit)
            self._receive_window += self._credit
            self._credit = 0

    def _break(self, error: SessionError) -> None:
        """The connection ends with this error."""
        self.broken = True
        self.goaway_said = GoAway.FINAL
        self._say_goaway(error.code)

    def _say_goaway(self, code: int) -> None:
        if self._last_taken is None:
            self._last_taken = 0 if self.client else max(self._newest, 0)
        self._out += frames.goaway(self._last_taken, code)

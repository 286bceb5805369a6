"""Flow control (RFC 9113 section 5.2): counts what each side may send, on each stream and on the connection.

A received byte is held until the owner has consumed it; consumed bytes are credited to the peer by
WINDOW_UPDATE, once they are a part of the window. DATA that has nobody to consume it is credited as it comes,
so that the connection's window stays true. Two places count inline what `received` and `opened` would: the
loop over received DATA frames, and `Session.send_data`.

A stream's receive window follows its reader and its path:

1. Streams begin with what SETTINGS say. A client gives each as much more as there is room for, because some
   servers drop what the window does not take at the moment in which the answer has ended (Envoy without
   `allow_multiplexed_upstream_half_close`).
2. Once in a round trip the window is compared with what the path needs: twice what was consumed in that time.
   If it is smaller, it grows to twice as much, for it may be the window itself that has kept more from
   coming. It shrinks to what is needed if received bytes had to wait for their reader. A client's window
   grows, too, while its reader keeps up.
3. A round trip is what the peer took to acknowledge our SETTINGS, `LONGEST_S` at most.
4. What a window has beyond its beginning is part of `WindowGrowth`, and the connection's window has as much
   more: a large window of one stream is nothing that others have to do without.
5. A window cannot be taken back. One that shrinks gets no credit until enough has been consumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shared.http2 import frames
from shared.http2.frame_rules import SessionError
from shared.http2.output import Output
from shared.http2.peer_settings import FIRST_WINDOW
from shared.http2.session_stream import SessionStream
from shared.http2.window_growth import WindowGrowth

LONGEST_S = 0.3
"""The longest round trip that windows follow, in seconds: to the other side of the world. It is assumed of a
peer that has not acknowledged our SETTINGS, when a window is to shrink."""

PARTS = 4
"""Of a window, each of which is credited when it has been consumed: often enough that a fast peer never
waits, rare enough to cost nothing."""

MOST_PART_BYTES = 4 << 20
"""With larger parts too little of a large window would be open for a peer that ends when it has sent all."""

MOST_READ_BYTES = 256 << 10
"""More than one read of the network brings; so if more is consumed at once, it had to wait for its reader."""


class Windows:
    """The windows of a connection and of its streams, whose counters are in their records."""

    __slots__ = (
        "_announced_at",
        "_clock",
        "_first_bytes",
        "_generous",
        "_growth",
        "_mark",
        "_most_bytes",
        "_output",
        "_size",
        "credit",
        "receive",
        "round_trip_s",
        "send",
    )

    def __init__(
        self,
        output: Output,
        *,
        connection_bytes: int,
        stream_bytes: int,
        most_stream_bytes: int,
        generous: bool,
        growth: WindowGrowth,
        clock: Callable[[], float],
    ) -> None:
        """What we have announced: the windows of the connection and of a new stream, in bytes; and how large
        a stream's may become, as far as `growth` has room. `generous` is a client's session."""
        self._output = output
        self._growth = growth
        self._clock = clock
        self._generous = generous
        self._first_bytes = stream_bytes
        self._most_bytes = most_stream_bytes
        self._announced_at = 0.0
        self.round_trip_s: float | None = None
        """Seconds; None: the peer has not acknowledged our SETTINGS."""
        self._size = connection_bytes  # with what streams have beyond their first windows
        self.send = FIRST_WINDOW
        """Bytes that we may send on the connection."""
        self.receive = connection_bytes
        """Bytes that the peer may send on the connection."""
        self.credit = 0
        """Bytes consumed on the connection, of which the peer has not been told yet."""
        self._mark = (connection_bytes + 1) // 2

    # Receiving.

    def received(self, stream: SessionStream | None, length: int) -> bool:
        """Counts a DATA frame of `length` bytes, padding included; `stream` is None if it has no open stream.
        False: it is beyond the stream's window.

        Raises:
            SessionError: it is beyond the connection's.
        """
        self.receive -= length
        if self.receive < 0:
            raise SessionError("the peer sent beyond the connection's window", frames.FLOW_CONTROL_ERROR)
        if stream is not None:
            stream.receive_window -= length
        return stream is None or stream.receive_window >= 0

    def held(self, stream: SessionStream, count: int) -> None:
        """`count` of the received bytes go to the owner."""
        stream.held += count

    def consumed(self, stream: SessionStream, count: int) -> None:
        """The owner has passed on `count` bytes of the stream, so the peer may send as many more."""
        if stream.state.receives:
            stream.credit = credit = stream.credit + count
            if credit >= stream.part:
                self._credit(stream, count)
        elif stream.state.over:
            return  # `released` has given back what was held
        stream.held -= count
        self.credit = credit = self.credit + count
        if credit >= self._mark:
            self._give_credit()

    def dropped(self, count: int) -> None:
        """`count` bytes have come that nobody consumes."""
        self.credit += count
        if self.credit >= self._mark:
            self._give_credit()

    def released(self, stream: SessionStream) -> None:
        """The stream is over: what it holds counts as consumed, and what its window has grown by is gone."""
        if stream.window > self._first_bytes:
            self._growth.release(stream)
            self._resize(stream, self._first_bytes)
        self.dropped(stream.held)
        stream.held = 0

    def lost(self, streams: Iterable[SessionStream]) -> None:
        """The connection is lost, and these streams with it."""
        for stream in streams:
            if stream.window > self._first_bytes:
                self._growth.release(stream)

    def announced(self) -> None:
        """Our SETTINGS go to the peer now."""
        self._announced_at = self._clock()

    def acknowledged(self) -> None:
        """The peer has acknowledged them."""
        if self.round_trip_s is None and self._announced_at:
            self.round_trip_s = min(self._clock() - self._announced_at, LONGEST_S)

    def began(self, stream: SessionStream) -> None:
        """A stream of ours is open."""
        if self._generous and self._most_bytes > self._first_bytes:
            self._ask(stream, self._most_bytes, self._clock())
            if stream.credit:
                self._tell(stream)

    def _credit(self, stream: SessionStream, count: int) -> None:
        """A part of the stream's window has been consumed, the last `count` bytes of it at once: sends
        WINDOW_UPDATE, for more or less than that if the window is to change."""
        now = self._clock()
        round_trip_s = LONGEST_S if self.round_trip_s is None else self.round_trip_s
        took_s = now - stream.since
        if took_s >= round_trip_s:
            if stream.since:
                used = stream.used + stream.credit
                needed = int(2 * used * round_trip_s / took_s) if took_s else 0
                self._follow(stream, needed, now, waited=count > MOST_READ_BYTES)
            stream.since, stream.used = now, -stream.credit
        if stream.credit > 0:
            self._tell(stream)

    def _follow(self, stream: SessionStream, needed: int, now: float, *, waited: bool) -> None:
        """The stream's path needs a window of `needed` bytes, its reader has let bytes wait or not."""
        window = stream.window
        if needed > window and self.round_trip_s is not None:
            wanted = 2 * needed
        elif waited:
            wanted = needed
        elif self._generous:
            wanted = 2 * window
        else:
            wanted = window
        wanted = max(min(wanted, self._most_bytes), self._first_bytes)
        if wanted > self._first_bytes or window > self._first_bytes:
            self._ask(stream, wanted, now)

    def _ask(self, stream: SessionStream, window: int, now: float) -> None:
        """The stream's window is to have `window` bytes, or what there is room for."""
        first = self._first_bytes
        most_more = frames.MAX_WINDOW - self._size + stream.window - first
        window = first + self._growth.ask(stream, min(window - first, most_more), now)
        if window != stream.window:
            self._resize(stream, window)

    def _tell(self, stream: SessionStream) -> None:
        self._output.send(frames.window_update(stream.id, stream.credit))
        stream.receive_window += stream.credit
        stream.used += stream.credit
        stream.credit = 0

    def _resize(self, stream: SessionStream, window: int) -> None:
        more = window - stream.window
        stream.window = window
        stream.part = part_of(window)
        stream.credit += more
        stream.used -= more
        self.credit += more
        self._size += more
        if self.credit >= self._mark:
            self._give_credit()

    def _give_credit(self) -> None:
        self._output.send(frames.window_update(0, self.credit))
        self.receive += self.credit
        self.credit = 0

    # Sending.

    def opened(self, stream: SessionStream | None, increment: int) -> bool:
        """Counts a WINDOW_UPDATE for `stream`, or for the connection. False: it is beyond what a window may
        be."""
        if stream is None:
            self.send += increment
            return self.send <= frames.MAX_WINDOW
        stream.send_window += increment
        return stream.send_window <= frames.MAX_WINDOW

    def resized(self, streams: Iterable[SessionStream], delta: int) -> None:
        """The peer's SETTINGS have changed the windows of all streams (RFC 9113 section 6.9.2).

        Raises:
            SessionError: beyond what a window may be.
        """
        for stream in streams:
            stream.send_window += delta
            if stream.send_window > frames.MAX_WINDOW:
                raise SessionError("SETTINGS opened a window too far", frames.FLOW_CONTROL_ERROR)


def part_of(window: int) -> int:
    """How much of a stream's window is consumed before it is credited, in bytes."""
    return min((window + PARTS - 1) // PARTS, MOST_PART_BYTES)

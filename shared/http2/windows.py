"""Flow control (RFC 9113 section 5.2): counts what each side may send, on each stream and on the connection.

A received byte is held until the owner has consumed it; consumed bytes are credited to the peer by
WINDOW_UPDATE once they are half a window. DATA that has nobody to consume it is credited as it comes, so that
the connection's window stays true. Two places count inline what `received` and `opened` would: the loop over
received DATA frames, and `Session.send_data`.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.http2 import frames
from shared.http2.frame_rules import SessionError
from shared.http2.output import Output
from shared.http2.peer_settings import FIRST_WINDOW
from shared.http2.session_stream import SessionStream


class Windows:
    """The windows of a connection and of its streams, whose counters are in their records."""

    __slots__ = ("_mark", "_output", "_stream_mark", "credit", "receive", "send")

    def __init__(self, output: Output, *, connection_bytes: int, stream_bytes: int) -> None:
        """What we have announced: the windows of the connection and of a new stream, in bytes."""
        self._output = output
        self.send = FIRST_WINDOW
        """Bytes that we may send on the connection."""
        self.receive = connection_bytes
        """Bytes that the peer may send on the connection."""
        self.credit = 0
        """Bytes consumed on the connection, of which the peer has not been told yet."""
        # Half a window: often enough that a fast peer never waits, rare enough to cost nothing.
        self._mark = (connection_bytes + 1) // 2
        self._stream_mark = (stream_bytes + 1) // 2

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
            credit = stream.credit + count
            if credit >= self._stream_mark:
                self._output.send(frames.window_update(stream.id, credit))
                stream.receive_window += credit
                credit = 0
            stream.credit = credit
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
        """The stream is over: what it holds counts as consumed."""
        self.dropped(stream.held)
        stream.held = 0

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

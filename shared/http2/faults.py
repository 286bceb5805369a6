"""What a fault of the peer costs: its stream, then new streams, then the connection."""

from __future__ import annotations

from shared.http2 import frames
from shared.http2.events import NoticeGiven, StreamReset
from shared.http2.flood_guard import FloodError, FloodGuard
from shared.http2.frame_rules import SessionError
from shared.http2.goaway import GoAway, GoAwayState
from shared.http2.output import Output
from shared.http2.session_stream import SessionStream, StreamState
from shared.http2.streams import Streams


class Faults:
    """The faults of one peer. A `shared_peer` may pass on what its own clients do (`FloodLimits.front_end`):
    it is given notice first, by a GOAWAY after which open streams go on."""

    def __init__(
        self,
        output: Output,
        streams: Streams,
        goaway: GoAway,
        guard: FloodGuard,
        *,
        client: bool,
        shared_peer: bool,
    ) -> None:
        self._output = output
        self._streams = streams
        self._goaway = goaway
        self._guard = guard
        self._client = client
        self._shared_peer = shared_peer
        self._notice_given = False

    def stream_error(self, stream: SessionStream, code: int, fault: str = "") -> None:
        """Resets a stream for what came on it.

        Raises:
            FloodError: there were too many such streams.
        """
        ended = stream.state is StreamState.HALF_CLOSED_LOCAL
        self._streams.reset(stream, code)
        self._output.events.append(StreamReset(stream, code, by_peer=False, local_ended=ended, fault=fault))
        if not self._client:
            self.stream_wasted()

    def stream_wasted(self, *, refused: bool = False, units: float = 1.0) -> None:
        """A stream was opened in vain, or something was as much work as `units` of these. After notice only
        refused streams count: the others may have been open before.

        Raises:
            FloodError: it is too much, and notice has been given or is not due.
        """
        final = self._goaway.state is GoAwayState.FINAL
        if self._shared_peer and final and not refused:
            return
        try:
            self._guard.stream_wasted(units)
        except FloodError:
            if not self._shared_peer or final or not self._streams.open:
                raise
            self._guard.forgive_resets()
            self._notice_given = True
            self._goaway.finish()
            self._output.events.append(NoticeGiven())

    def explain_notice(self) -> None:
        """Tells a peer that was given notice the reason, once, now that the last stream is over: some clients
        break off open streams at a GOAWAY with an error."""
        if self._notice_given:
            self._notice_given = False
            self._goaway.send_final(frames.ENHANCE_YOUR_CALM)

    def end_connection(self, error: SessionError) -> None:
        """Sends GOAWAY with the error; nothing is sent after it."""
        self._goaway.send_final(error.code)
        self._output.broken = True

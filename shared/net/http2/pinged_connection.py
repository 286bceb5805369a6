"""An HTTP/2 connection that notices when the other end has gone without a word, and keeps its path open.

Owned here: PING after silence, and the end of a connection that stays silent. Reverse connections have it at
both ends (`gateway/reverse/reverse_port.py`, `agent/tunnels/reverse.py`): they are open for weeks, mostly
idle, over NAT that forgets idle TCP connections after minutes, and the end that does not notice believes
itself registered. The command `hbone URL` has it because a person waits at the terminal.

Any byte that arrives is a sign of life, so a busy connection is never pinged. After one interval of silence
the peer is pinged, after two the connection is dropped. Two kinds of silence are not the peer's fault, and it
gets another interval for each: this process was held up and has not read, or the PING has not arrived yet,
because on a slow line it waits behind an upload of which the peer still acknowledges bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.errors import RefusedError
from shared.http2.session import SessionLimits
from shared.net.http2.connection import Connection
from shared.net.legs.stream import Stream
from shared.net.legs.tcp_end import acknowledged_bytes, unsent_bytes

LATE_S = 1.0
"""A timer that is so late says that this process was held up."""


class PingedConnection(Connection):
    """See the module. `cause` says why it was lost, empty as long as nobody knows better than "it ended"."""

    cause = ""

    unanswered_s = 0.0
    """Seconds for which the peer was silent, if it was dropped for that."""

    def __init__(
        self,
        interval_s: float,
        *,
        client: bool,
        limits: SessionLimits | None = None,
        on_request: Callable[[Stream], None] | None = None,
        on_change: Callable[[], None] | None = None,
        on_lost: Callable[[Connection], None] | None = None,
    ) -> None:
        """After `interval_s` seconds of silence the peer is asked, after as many again it is dropped; 0 turns
        that off."""
        super().__init__(
            client=client, limits=limits, on_request=on_request, on_change=on_change, on_lost=on_lost
        )
        self._interval_s = interval_s
        self._is_asked = False  # a PING went out
        self._heard_before = 0.0  # what `heard_at` was then
        self._look_at = 0.0  # when the timer is due
        self._look_timer: asyncio.TimerHandle | None = None
        self._acknowledged: int | None = None  # bytes that the peer's kernel had taken at the last look
        self._ahead = 0  # bytes that it has to take before the PING

    @property
    def ended_in_order(self) -> bool:
        """Whether one of the ends has said that it would end."""
        return not self.cause and (self._closing or self.session.goaway_received)

    def say_goodbye(self) -> None:
        """Sends GOAWAY and goes on: our own streams may still be opened, and nothing is closed. `drain` is
        the end of that."""
        self.session.goaway()
        self.flush_soon()

    def abort(self, text: str) -> None:
        self.cause = self.cause or text
        super().abort(text)

    def expel(self, error: RefusedError) -> None:
        self.cause = self.cause or str(error)
        super().expel(error)

    # asyncio.BufferedProtocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._interval_s:
            self._look_at_time(self._loop.time() + self._interval_s)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look_timer is not None:
            self._look_timer.cancel()
        if exc is not None:
            self.cause = self.cause or str(exc)
        super().connection_lost(exc)

    # Looking.

    def _look_at_time(self, due: float) -> None:
        self._look_at = due
        self._look_timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        """One timer, which no byte moves: whatever has come since is found out when it is due."""
        now = self._loop.time()
        if not self._is_asked or self.heard_at != self._heard_before:
            self._is_asked = False
            if now < self.heard_at + self._interval_s:
                self._look_at_time(self.heard_at + self._interval_s)
                return
            self._ask()
        elif not (now > self._look_at + LATE_S or self._is_behind_an_upload()):
            self.unanswered_s = 2 * self._interval_s
            self.abort(f"{self.peer_name} has not answered PING within {self._interval_s:g} s")
            return
        self._look_at_time(now + self._interval_s)

    def _ask(self) -> None:
        assert self._transport is not None
        self._is_asked, self._heard_before = True, self.heard_at
        self._acknowledged = acknowledged_bytes(self._transport)
        self._ahead = unsent_bytes(self._transport)
        self.ping()

    def _is_behind_an_upload(self) -> bool:
        """Whether bytes that were sent before the PING were still arriving since the last look."""
        assert self._transport is not None
        now, before = acknowledged_bytes(self._transport), self._acknowledged
        if now is None or before is None:
            return False
        arrived = now - before
        was_behind, self._acknowledged = self._ahead > 0, now
        self._ahead -= arrived
        return was_behind and arrived > 0

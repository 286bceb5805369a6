"""An HTTP/2 connection that notices when the other end has gone without a word, and keeps its path open.

Owned here: PING after silence, and the end of a connection that stays silent. Reverse connections have it at
both ends (`gateway/reverse.py`, `agent/reverse.py`): they are open for weeks, mostly idle, over NAT that
forgets idle TCP connections after minutes, and the end that does not notice believes itself registered.

Any byte that arrives is a sign of life, so a busy connection is never pinged. A silent one is pinged after
one interval, and dropped if the next one brings nothing either: what has gone is noticed after two to three.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.errors import RefusedError
from shared.net.connection import Connection
from shared.net.stream import Stream
from shared.wire.session import SessionLimits


class PingedConnection(Connection):
    """See the module. `cause` says why it was lost, empty as long as nobody knows better than "it ended"."""

    cause = ""

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
        """`interval_s` is how many seconds of silence there may be."""
        super().__init__(
            client=client, limits=limits, on_request=on_request, on_change=on_change, on_lost=on_lost
        )
        self._interval_s = interval_s
        self._known_at = 0.0  # when the last look saw that something had come
        self._pinged = False  # we have asked since
        self._look_timer: asyncio.TimerHandle | None = None

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
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look_timer is not None:
            self._look_timer.cancel()
        if exc is not None:
            self.cause = self.cause or str(exc)
        super().connection_lost(exc)

    # Looking.

    def _look_later(self) -> None:
        self._look_timer = asyncio.get_running_loop().call_later(self._interval_s, self._look)

    def _look(self) -> None:
        if self.heard_at != self._known_at:
            self._known_at, self._pinged = self.heard_at, False
        elif self._pinged:
            self.abort(f"{self.peer_name} has not answered PING within {self._interval_s:g} s")
            return
        else:
            self._pinged = True
            self.ping()
        self._look_later()

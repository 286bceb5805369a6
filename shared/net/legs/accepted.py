"""An accepted connection, TCP or a unix socket, as a leg that says what comes before it is joined."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.net.legs.tcp import TcpLeg


class AcceptedLeg(TcpLeg):
    """Calls `accepted(self)` once its transport is there. `on_early()` is called whenever something has come
    and is kept (`first`), as long as there is no relay."""

    __slots__ = ("_accepted", "on_early", "on_lost")

    def __init__(self, accepted: Callable[[AcceptedLeg], None]) -> None:
        super().__init__()
        self._accepted: Callable[[AcceptedLeg], None] | None = accepted
        self.on_early: Callable[[], None] | None = None
        self.on_lost: Callable[[], None] | None = None

    @property
    def lost(self) -> bool:
        """Its peer has broken off before it was joined, or has been turned away."""
        return self._gone

    @property
    def has_ended(self) -> bool:
        """Its peer has finished sending."""
        return self._ended

    def early_came(self, early: bytearray) -> None:
        super().early_came(early)
        if self.on_early is not None:
            self.on_early()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        accepted, self._accepted = self._accepted, None  # which names us
        if accepted is not None:
            accepted(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.on_early = None
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

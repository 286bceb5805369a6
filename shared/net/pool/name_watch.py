"""A name that is looked up again from time to time, so that a change of its addresses is noticed. A look-up
that fails says nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shared.address import Address
from shared.net.legs.tcp import address_text
from shared.net.names.endpoint import Resolve
from shared.tasks import spawn

log = logging.getLogger("hbone.pool")

JITTER = 0.1
"""The part of the interval by which a look-up may come earlier, so that many names are not looked up at
once."""


class NameWatch:
    """Calls `found` with the addresses of `address` (host:port texts) after each look-up while it runs."""

    def __init__(
        self,
        address: Address,
        resolve: Resolve,
        *,
        chance: Callable[[], float],
        found: Callable[[set[str]], None],
    ) -> None:
        self._address = address
        self._resolve = resolve
        self._chance = chance
        self._found = found
        self._interval_s = 0.0
        self._timeout_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, interval_s: float, timeout_s: float) -> None:
        """Looks every `interval_s` seconds from now on, if that is not 0 and there is a name to look up; an
        answer may take `timeout_s`. A change of these counts from the next look-up on."""
        self._interval_s, self._timeout_s = interval_s, timeout_s
        if self._timer is None and self._task is None:
            self._plan()

    def stop(self) -> None:
        """Looks no longer."""
        self._interval_s = 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _plan(self) -> None:
        if self._interval_s and not self._address.is_ip:
            due_s = self._interval_s * (1 - JITTER * self._chance())
            self._timer = asyncio.get_running_loop().call_later(due_s, self._due)

    def _due(self) -> None:
        self._timer = None
        self._task = spawn(self._look_up(), name=f"look up {self._address.host}")

    async def _look_up(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                endpoints = await self._resolve(self._address)
            if self._interval_s:
                self._found({address_text(name) for _, name in endpoints})
        except (OSError, TimeoutError) as error:
            log.debug("look up %s: %s", self._address.host, error or "no answer in time")
        finally:
            self._task = None
            self._plan()

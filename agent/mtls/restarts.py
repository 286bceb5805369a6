"""A program that dies is started again, after a pause that grows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shared.backoff import doubled_s
from shared.errors import UnavailableError

log = logging.getLogger("hbone.agent")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0

STEADY_S = 60.0
"""After one that has run for so long the first pause counts again."""


class Restarts:
    """The pauses of one program."""

    def __init__(self) -> None:
        self._failures = 0

    def pause_s(self, ran_s: float) -> float:
        """The seconds to wait, after it has run for `ran_s` seconds."""
        if ran_s >= STEADY_S:
            self._failures = 0
        pause_s = doubled_s(FIRST_PAUSE_S, LONGEST_PAUSE_S, self._failures)
        self._failures += 1
        return pause_s


async def keep_running(ended: Callable[[], Awaitable[str]], start: Callable[[], Awaitable[None]]) -> None:
    """Starts a running program again whenever it has ended, until it is cancelled. `ended` returns then,
    with what is to be said of it; `start` raises UnavailableError if there is no new one."""
    loop = asyncio.get_running_loop()
    restarts = Restarts()
    while True:
        began = loop.time()
        told = await ended()
        pause_s = restarts.pause_s(loop.time() - began)
        log.error("%s; again in %g s", told, pause_s)
        await asyncio.sleep(pause_s)
        try:
            await start()
        except UnavailableError as error:
            log.error("%s", error)

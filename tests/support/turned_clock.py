"""A wall clock that a test turns, for what waits by `certificate_keeper.Clock`."""

from __future__ import annotations

import asyncio
import heapq
import time
from itertools import count

PATIENCE_S = 10.0
"""Real seconds, for what does not depend on the clock, such as a key made in a thread."""


class TurnedClock:
    """Stands still until `turn`; one task at a time waits by it."""

    def __init__(self, now_s: float | None = None) -> None:
        self.now_s = float(int(time.time())) if now_s is None else now_s
        self._waits: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()
        self._waited_for = asyncio.Event()

    def now(self) -> float:
        return self.now_s

    async def wait(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waits, (self.now_s + seconds, next(self._order), future))
        self._waited_for.set()
        await future

    async def settle(self) -> None:
        """Returns when somebody waits for the clock: whatever was to be done at this time has been done."""
        async with asyncio.timeout(PATIENCE_S):
            while not any(not future.done() for _, _, future in self._waits):
                self._waited_for.clear()
                await self._waited_for.wait()

    async def turn(self, seconds: float) -> None:
        """Lets so many seconds pass, and everything happen in them that is due."""
        end_s = self.now_s + seconds
        await self.settle()
        while self._waits and self._waits[0][0] <= end_s:
            at_s, _, future = heapq.heappop(self._waits)
            self.now_s = max(self.now_s, at_s)
            if not future.done():  # else whoever waited was cancelled
                future.set_result(None)
                await self.settle()
        self.now_s = end_s

    def wake(self) -> float:
        """Wakes whoever waits for the earliest time before it has come; returns that time."""
        at_s, _, future = heapq.heappop(self._waits)
        future.set_result(None)
        return at_s

    def jump(self, seconds: float) -> None:
        """Sets the clock without waking anybody: a container that was frozen, a clock that was set."""
        self.now_s += seconds

"""How late the event loop is: the one number that says that a process has too much to do, or was stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LAG_INTERVAL_S = 0.25
"""Between two looks: four short turns of the loop in a second cost nothing that can be measured."""


class LoopLag:
    """Sets a timer again and again, and tells how late each was."""

    def __init__(self, observe: Callable[[float], None]) -> None:
        """`observe` is called with seconds."""
        self._observe = observe
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def start(self) -> None:
        """From now on measures."""
        loop = asyncio.get_running_loop()
        # uvloop's clock stands still during a turn, and its timers have whole milliseconds.
        self._due = loop.time() + LAG_INTERVAL_S
        self._timer = loop.call_later(LAG_INTERVAL_S, self._look)

    def close(self) -> None:
        """Stops."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._observe(max(0.0, asyncio.get_running_loop().time() - self._due))
        self.start()

"""An event loop for tests of deadlines: when nothing is left to do, its clock jumps to the next timer.

Sockets are real, so it looks at them for `GRACE_S` before each jump: loopback delivers within the call that
sends, and what a thread or another process does takes longer and is none of its business. Real time does not
count, so a wait takes as long as was said, however busy the machine is.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Mapping
from typing import Any

import pytest

GRACE_S = 0.005

TURN_S = 0.0001
"""What a turn takes in which there is something to do: who never rests has to see time pass, too."""

BEGIN_S = 8709.517
"""What the clock has at first: a machine that has been up for some hours, whose sums are not round."""

hasty = pytest.mark.asyncio(loop_factories=["hasty"])
"""Marks a test that runs on this loop."""


class _Selector(selectors.BaseSelector):
    """Waits `GRACE_S` at most, and tells the clock what was to be waited for."""

    def __init__(self) -> None:
        self.now_s = BEGIN_S
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return self._real.select(None)
        if timeout <= 0:  # there is something to do
            self.now_s += TURN_S
            return self._real.select(0)
        ready = self._real.select(GRACE_S)
        if not ready:
            # The sum may be rounded to just before the timer that was meant.
            self.now_s = max(self.now_s + timeout, math.nextafter(self.now_s, math.inf))
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class HastyLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop with a clock that jumps."""

    def __init__(self) -> None:
        self._hasty = _Selector()
        super().__init__(self._hasty)

    def time(self) -> float:
        return self._hasty.now_s

    def hold_up(self, seconds: float) -> None:
        """Lets time pass in which nobody looks at a socket: a process that was stopped, or a busy machine."""
        self._hasty.now_s += seconds

"""An event loop for tests of deadlines: when nothing is left to do, its clock jumps to the next timer.

Sockets are real, so it looks at them for `GRACE_S` before each jump: loopback delivers within the call that
sends, and what a thread or another process does takes longer and is none of its business.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any

import pytest

GRACE_S = 0.005

hasty = pytest.mark.asyncio(loop_factories=["hasty"])
"""Marks a test that runs on this loop."""


class _Selector(selectors.BaseSelector):
    """Waits `GRACE_S` at most, and counts what it did not wait."""

    def __init__(self) -> None:
        self.skipped_s = 0.0
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= GRACE_S:
            return self._real.select(timeout)
        ready = self._real.select(GRACE_S)
        if not ready:
            self.skipped_s += timeout - GRACE_S
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
        return super().time() + self._hasty.skipped_s

    def hold_up(self, seconds: float) -> None:
        """Lets time pass in which nobody looks at a socket: a process that was stopped, or a busy machine."""
        self._hasty.skipped_s += seconds

"""Many deadlines that nearly always are met, with one timer for all of them.

For waits of one length, of which there may be thousands at once: a timer for each would have to be made and
cancelled for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

GRAIN_S = 0.01
"""Deadlines so close to each other are met together, at the last of them: a crowd that came in one second
wakes us up a hundred times, not once for each."""


class Deadlines(Generic[T]):
    """Calls `overdue(thing)` once when its time has come, unless it was dropped before.

    It is late by `GRAIN_S` at most. A thing whose deadline is before that of one added earlier, as after the
    length was changed, may be told with that one.
    """

    __slots__ = ("_due", "_is_set", "_loop", "_overdue")

    def __init__(self, overdue: Callable[[T], None]) -> None:
        self._overdue = overdue
        self._due: dict[T, float] = {}  # in the order of the deadlines
        self._is_set = False  # the timer, for the first of them, or for one that was
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, thing: T, due: float) -> None:
        """`thing` has until `due`, by the loop's clock in seconds."""
        self._due[thing] = due
        if not self._is_set:
            self._is_set = True
            self._loop.call_at(due, self._check)

    def drop(self, thing: T) -> None:
        """It has made it; nothing if it was not there."""
        self._due.pop(thing, None)

    def _check(self) -> None:
        self._is_set = False
        now = self._loop.time()
        late = []
        for thing, due in self._due.items():
            if due > now:
                self._is_set = True
                self._loop.call_at(max(due, now + GRAIN_S), self._check)
                break
            late.append(thing)
        for thing in late:
            if self._due.pop(thing, None) is not None:  # else the one before has dropped it
                self._overdue(thing)

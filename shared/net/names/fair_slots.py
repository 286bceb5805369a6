"""A number of slots that several parties share fairly: none has more than its part, and who waits is served
party by party, so that one with a long queue delays nobody but itself.

No clock, no I/O. A queue that is full costs the party that fills it: for somebody with a shorter one its last
entry makes room.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from shared.errors import LimitError


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """How many there are."""

    most: int
    """Slots in all."""

    most_each: int
    """Of them, those that one party may have."""

    most_waiting: int
    """Entries that may wait in all."""

    most_waiting_each: int
    """Of them, those of one party."""


class FairSlots:
    """The slots. `refused(party, is_own)` makes the error of an entry that finds no room to wait: because the
    party's own queue is full, or else because all together wait too much."""

    def __init__(self, limits: SlotLimits, refused: Callable[[str, bool], LimitError]) -> None:
        self.limits = limits
        """May be replaced at any time; who has a slot keeps it."""
        self.taken = 0
        """Slots that are taken."""
        self.waiting = 0
        """Entries that wait for one."""
        self._refused = refused
        self._taken_by: dict[str, int] = {}
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}  # in the order in which parties are served

    async def enter(self, party: str) -> None:
        """Returns with a slot of `party`, for which `leave` is to be called. Raises LimitError if there are
        too many entries already."""
        if self._has_room(party) and party not in self._queues and self.taken < self.limits.most:
            self._take(party)
            return
        self._make_room(party)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(party, deque()).append(waiter)
        self.waiting += 1
        try:
            await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.leave(party)  # cancelled in the very moment in which it was served
            else:
                self._drop(party, waiter)
            raise

    def leave(self, party: str) -> None:
        """Gives a slot of `party` back."""
        self.taken -= 1
        left = self._taken_by[party] - 1
        if left:
            self._taken_by[party] = left
        else:
            del self._taken_by[party]
        self._serve()

    def _has_room(self, party: str) -> bool:
        return self._taken_by.get(party, 0) < self.limits.most_each

    def _take(self, party: str) -> None:
        self.taken += 1
        self._taken_by[party] = self._taken_by.get(party, 0) + 1

    def _serve(self) -> None:
        while self.taken < self.limits.most:
            # Those that it goes past have all their slots, so they are few.
            party = next(filter(self._has_room, self._queues), None)
            if party is None:
                return
            queue = self._queues.pop(party)
            waiter = queue.popleft()
            self.waiting -= 1
            if queue:
                self._queues[party] = queue  # behind the others
            self._take(party)
            waiter.set_result(None)

    def _make_room(self, party: str) -> None:
        """Raises LimitError if there is no place in the queue."""
        own = len(self._queues.get(party, ()))
        if own >= self.limits.most_waiting_each:
            raise self._refused(party, True)
        if self.waiting < self.limits.most_waiting:
            return
        longest = max(self._queues, key=lambda each: len(self._queues[each]), default=party)
        if len(self._queues.get(longest, ())) <= own + 1:
            raise self._refused(party, False)
        last = self._queues[longest][-1]
        self._drop(longest, last)
        last.set_exception(self._refused(longest, False))

    def _drop(self, party: str, waiter: asyncio.Future[None]) -> None:
        queue = self._queues.get(party)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            self.waiting -= 1
            if not queue:
                del self._queues[party]

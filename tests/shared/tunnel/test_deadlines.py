"""Many deadlines with one timer."""

from __future__ import annotations

import asyncio

from shared.tunnel.deadlines import Deadlines

PATIENCE_S = 10.0


class Late:
    """What was told, in order."""

    def __init__(self) -> None:
        self.things: list[str] = []
        self.told_at: dict[str, float] = {}
        """When, by the loop's clock."""
        self._all = asyncio.Event()
        self._last = ""

    def __call__(self, thing: str) -> None:
        self.things.append(thing)
        self.told_at[thing] = asyncio.get_running_loop().time()
        if thing == self._last:
            self._all.set()

    async def until(self, last: str) -> list[str]:
        self._last = last
        self._all.clear()
        async with asyncio.timeout(PATIENCE_S):
            if last not in self.things:
                await self._all.wait()
        return self.things


async def test_each_is_told_once_and_not_before_its_time() -> None:
    loop, late = asyncio.get_running_loop(), Late()
    deadlines = Deadlines(late)
    began = loop.time()
    due = {name: began + after_s for name, after_s in (("first", 0.02), ("second", 0.025), ("third", 0.06))}
    for name, at in due.items():
        deadlines.add(name, at)
    assert len(deadlines) == 3
    assert await late.until("third") == ["first", "second", "third"]
    # Points in time, not durations: a difference of two of them is rounded.
    assert [name for name, at in due.items() if late.told_at[name] < at] == []
    assert len(deadlines) == 0


async def test_what_was_dropped_is_not_told() -> None:
    loop, late = asyncio.get_running_loop(), Late()
    deadlines = Deadlines(late)
    now = loop.time()
    deadlines.add("met", now + 0.01)
    deadlines.add("missed", now + 0.02)
    deadlines.drop("met")
    deadlines.drop("met")
    assert await late.until("missed") == ["missed"]


async def test_one_that_is_told_may_drop_another() -> None:
    loop = asyncio.get_running_loop()
    told: list[str] = []
    last = asyncio.Event()

    def overdue(thing: str) -> None:
        told.append(thing)
        deadlines.drop("second")
        if thing == "third":
            last.set()

    deadlines = Deadlines(overdue)
    due = loop.time() + 0.01
    for name in ("first", "second", "third"):
        deadlines.add(name, due)
    async with asyncio.timeout(PATIENCE_S):
        await last.wait()
    assert told == ["first", "third"]


async def test_it_goes_on_after_a_rest() -> None:
    loop, late = asyncio.get_running_loop(), Late()
    deadlines = Deadlines(late)
    deadlines.add("early", loop.time() + 0.01)
    await late.until("early")
    deadlines.add("late", loop.time() + 0.01)
    assert await late.until("late") == ["early", "late"]

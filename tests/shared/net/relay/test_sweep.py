"""Looks at everything now and then, on a clock that jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from shared.net.relay.sweep import SLICE, Sweep
from tests.shared.net.hasty_loop import hasty
from tests.shared.net.loopback import until


class Looks:
    """A sweep over numbers, and what it has looked at."""

    def __init__(self, things: Iterable[int], interval_s: float = 10.0) -> None:
        self.things = set(things)
        self.seen: list[int] = []
        self.done = 0
        self.interval_s = interval_s
        self.sweep = Sweep(lambda: self.things, self.look, interval_s=lambda: self.interval_s, done=self.end)

    def look(self, thing: int) -> None:
        self.seen.append(thing)

    def end(self) -> None:
        self.done += 1


@hasty
async def test_each_thing_once_an_interval() -> None:
    looks = Looks(range(3))
    looks.sweep.start()
    looks.sweep.start()
    await asyncio.sleep(9)
    assert looks.seen == []
    await asyncio.sleep(2)
    assert (sorted(looks.seen), looks.done) == ([0, 1, 2], 1)
    looks.interval_s = 5
    await asyncio.sleep(15)
    assert looks.done == 3, "the interval counts from the next look on"
    looks.sweep.stop()
    assert not looks.sweep.running
    await asyncio.sleep(100)
    assert looks.done == 3


@hasty
async def test_others_have_their_turn_between_slices() -> None:
    looks = Looks(range(4 * SLICE))
    looks.sweep.start()
    turns = 0
    await until(lambda: bool(looks.seen))
    while not looks.done:
        before = len(looks.seen)
        await asyncio.sleep(0)
        turns += 1
        assert len(looks.seen) - before <= SLICE
    assert turns >= 4
    assert sorted(looks.seen) == list(range(4 * SLICE))


@hasty
async def test_things_may_come_and_go_meanwhile() -> None:
    looks = Looks(range(2 * SLICE))

    def look(thing: int) -> None:
        looks.seen.append(thing)
        looks.things.discard(thing)
        looks.things.add(-1 - thing)

    sweep = Sweep(lambda: looks.things, look, interval_s=lambda: 1.0)
    sweep.start()
    await asyncio.sleep(1.5)
    assert sorted(looks.seen) == list(range(2 * SLICE))
    sweep.stop()


@hasty
async def test_a_look_may_stop_it() -> None:
    looks = Looks(range(2 * SLICE))
    stopped = Sweep(lambda: looks.things, lambda _: stopped.stop(), interval_s=lambda: 1.0, done=looks.end)
    stopped.start()
    await asyncio.sleep(10)
    assert looks.done == 0
    ending = Sweep(lambda: looks.things, looks.look, interval_s=lambda: 1.0, done=lambda: ending.stop())
    ending.start()
    await asyncio.sleep(10)
    assert len(looks.seen) == 2 * SLICE


@hasty
async def test_nothing_to_look_at() -> None:
    looks = Looks(())
    looks.sweep.start()
    await asyncio.sleep(25)
    assert looks.done == 2
    looks.sweep.stop()

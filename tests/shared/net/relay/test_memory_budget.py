"""The sum of what is held, and who goes when it is too much."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shared.errors import HboneError, OverloadError
from shared.net.relay.memory_budget import (
    CALM_S,
    TENSE_S,
    URGENT_S,
    Holder,
    MemoryBudget,
    Part,
    default_most_bytes,
)
from tests.shared.net.hasty_loop import hasty

MIB = 1 << 20


class Holding:
    """A tunnel that holds what the test says; a reset lets go of it."""

    def __init__(self, buffered_bytes: int) -> None:
        self.buffered_bytes = buffered_bytes
        self.error: HboneError | None = None

    def abort(self, error: HboneError) -> None:
        self.buffered_bytes = 0
        self.error = error


class Held:
    """A budget over some of them."""

    def __init__(self, *sizes: int, most: int, others: int = 0, part: Part | None = None) -> None:
        self.holders = [Holding(size) for size in sizes]
        self.others = others
        self.budget = MemoryBudget(most, lambda: self.holders, lambda: self.others, part=part)
        self.budget.start()

    @property
    def reset(self) -> list[int]:
        """Which of them were reset."""
        return [number for number, holder in enumerate(self.holders) if holder.error]


@hasty
async def test_the_sum() -> None:
    held = Held(1, 0, 10, most=1000, others=100)
    await asyncio.sleep(CALM_S + 0.1)
    assert held.budget.held_bytes == 111
    held.holders.pop()
    await asyncio.sleep(CALM_S)
    assert held.budget.held_bytes == 101
    assert not held.budget.full
    held.budget.close()


@hasty
async def test_above_the_mark_it_is_full_and_nobody_is_reset() -> None:
    held = Held(60, 49, most=100)
    await asyncio.sleep(CALM_S + 0.1)
    assert held.budget.full
    assert held.reset == []
    held.holders[0].buffered_bytes = 50
    await asyncio.sleep(TENSE_S * 1.5)
    assert not held.budget.full
    held.budget.close()


@hasty
async def test_who_holds_most_is_reset_first() -> None:
    held = Held(10, 70, 5, 60, 1, most=100)
    await asyncio.sleep(CALM_S + 0.1)
    assert held.reset == [1]
    [error] = [holder.error for holder in held.holders if holder.error]
    assert isinstance(error, OverloadError)
    assert str(error) == "it holds 70 of 146 bytes, which are more than the 100 of max_buffered"
    assert held.budget.held_bytes == 76
    held.holders[3].buffered_bytes = 200
    held.holders[0].buffered_bytes = 99
    await asyncio.sleep(TENSE_S * 1.5)
    assert held.reset == [0, 1, 3], "until the rest is below the mark"
    held.budget.close()


@hasty
async def test_what_nobody_holds_resets_all_and_no_more() -> None:
    held = Held(1, 2, most=100, others=200)
    await asyncio.sleep(CALM_S + 0.1)
    assert held.reset == [0, 1]
    assert held.budget.full
    held.budget.close()


@hasty
async def test_the_mark_may_change_and_be_off() -> None:
    held = Held(10 * MIB, most=0)
    await asyncio.sleep(CALM_S * 3)
    assert (held.budget.full, held.reset, held.budget.held_bytes) == (False, [], 10 * MIB)
    held.budget.most_bytes = MIB
    await asyncio.sleep(CALM_S)
    assert held.reset == [0]
    held.budget.close()
    held.holders[0].buffered_bytes = 1
    await asyncio.sleep(CALM_S * 3)
    assert held.budget.held_bytes == 0, "closed, it looks no more"


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"sys/fs/cgroup/memory.max": "536870912\n", "proc/meminfo": "MemTotal: 8388608 kB\n"}, 256 * MIB),
        (
            {"sys/fs/cgroup/memory.max": "max\n", "proc/meminfo": "MemTotal:  1048576 kB\nMemFree: 1 kB\n"},
            512 * MIB,
        ),
        (
            # What version 1 has where there is no limit.
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "proc/meminfo": "MemTotal: 4096 kB\n",
            },
            2 * MIB,
        ),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "1048576\n"}, MIB // 2),
        ({}, 0),
    ],
)
def test_the_default_is_half_of_what_there_is(tmp_path: Path, files: dict[str, str], most: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert default_most_bytes(tmp_path) == most


def test_this_machine_has_some() -> None:
    assert default_most_bytes() > 16 * MIB


@hasty
async def test_it_says_why_nothing_new_is_taken() -> None:
    held = Held(60, 49, most=100)
    assert held.budget.refusal() is None
    await asyncio.sleep(CALM_S + 0.1)
    refusal = held.budget.refusal()
    assert str(refusal) == "109 bytes are held for all peers, which are more than the 100 of max_buffered"
    assert refusal is not None and (refusal.limit, refusal.flag) == ("max_buffered", "LIMIT")
    held.holders.pop()
    await asyncio.sleep(CALM_S)
    assert held.budget.refusal() is None
    held.budget.close()


@hasty
async def test_it_looks_often_while_more_may_come_than_there_is_room_for() -> None:
    looks = 0

    def nobody() -> list[Holding]:
        nonlocal looks
        looks += 1
        return []

    may_come, held = 100, 0
    budget = MemoryBudget(100, nobody, lambda: held, may_come=lambda: may_come)
    budget.start()
    await asyncio.sleep(CALM_S + TENSE_S / 2)
    assert looks == 1
    may_come = 101
    await asyncio.sleep(CALM_S)
    before = looks
    await asyncio.sleep(5 * TENSE_S)
    assert before + 4 <= looks <= before + 6
    held = 60
    await asyncio.sleep(2 * TENSE_S)
    before = looks
    await asyncio.sleep(5 * URGENT_S)
    assert before + 4 <= looks <= before + 6
    budget.close()


def large(holder: Holder) -> bool:
    return holder.buffered_bytes >= 30


@hasty
async def test_a_part_leaves_the_rest_to_others() -> None:
    part = Part(large, 0.5, "uploads")
    held = Held(30, 32, 20, 15, most=100, part=part)
    await asyncio.sleep(CALM_S + 0.1)
    assert held.reset == [1], "the part's largest, until the part is below its share"
    assert (part.held_bytes, held.budget.held_bytes) == (30, 65)
    assert held.budget.part_refusal() is None
    error = held.holders[1].error
    assert str(error) == "it holds 32 of 62 bytes, which are more than the 50 of 50% of max_buffered"
    held.budget.close()


@hasty
async def test_a_part_that_is_full_keeps_only_itself_out() -> None:
    held = Held(51, 20, most=100, part=Part(large, 0.5, "uploads"))
    await asyncio.sleep(CALM_S + 0.1)
    assert held.reset == []
    assert held.budget.refusal() is None
    refusal = held.budget.part_refusal()
    assert str(refusal) == (
        "51 bytes are held for uploads, which are more than the 50 of 50% of max_buffered"
    )
    held.others = 35
    await asyncio.sleep(CALM_S)
    assert held.budget.refusal() is not None
    assert str(held.budget.part_refusal()) == str(held.budget.refusal())
    held.budget.close()

"""Slots, and who gets the next one: told step by step, and with hypothesis for what always holds."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shared.errors import LimitError
from shared.net.names.fair_slots import FairSlots, SlotLimits
from shared.tasks import spawn


def slots(most: int = 4, most_each: int = 2, most_waiting: int = 10, most_waiting_each: int = 5) -> FairSlots:
    def refused(party: str, is_own: bool) -> LimitError:
        return LimitError(f"{party}: {'own' if is_own else 'all'}", "limit")

    return FairSlots(SlotLimits(most, most_each, most_waiting, most_waiting_each), refused)


class Entry:
    """Somebody who enters for a party."""

    def __init__(self, all_: FairSlots, party: str) -> None:
        self.party = party
        self.slots = all_
        self.task = spawn(all_.enter(party), name=f"enter for {party}")

    @property
    def state(self) -> str:
        if not self.task.done():
            return "waits"
        if self.task.cancelled():
            return "left"
        return str(self.task.exception() or "in")

    def leave(self) -> None:
        self.slots.leave(self.party)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def entered(all_: FairSlots, *parties: str) -> list[Entry]:
    entries = [Entry(all_, party) for party in parties]
    await settled()
    return entries


def states(*entries: Entry) -> list[str]:
    return [entry.state for entry in entries]


async def test_parties_are_served_in_turn_however_long_their_queues() -> None:
    all_ = slots(most=2, most_each=2)
    first = await entered(all_, "a", "a")
    crowd = await entered(all_, *"aaaaa")
    (late,) = await entered(all_, "b")
    first[0].leave()
    await settled()
    assert states(crowd[0], late) == ["in", "waits"]
    first[1].leave()
    await settled()
    assert states(crowd[1], late) == ["waits", "in"]


async def test_a_party_that_has_its_part_is_passed_over() -> None:
    all_ = slots(most=3, most_each=2)
    a = await entered(all_, "a", "a", "a")
    b = await entered(all_, "b", "b")
    assert states(*a, *b) == ["in", "in", "waits", "in", "waits"]
    b[0].leave()
    await settled()
    assert states(*a, b[1]) == ["in", "in", "waits", "in"]


async def test_a_queue_has_an_end() -> None:
    all_ = slots()
    a = await entered(all_, *"aa", *"aaaaa", "a")
    assert states(*a) == ["in"] * 2 + ["waits"] * 5 + ["a: own"]


async def test_when_all_queues_are_full_the_longest_makes_room() -> None:
    all_ = slots(most=1, most_each=1, most_waiting=5, most_waiting_each=4)
    (holder,) = await entered(all_, "x")
    a = await entered(all_, *"aaaa")
    b = await entered(all_, "b")
    (c,) = await entered(all_, "c")
    assert states(*a, *b, c) == ["waits"] * 3 + ["a: all"] + ["waits", "waits"]
    # And a party whose own is the longest has to go itself.
    (fifth,) = await entered(all_, "a")
    assert fifth.state == "a: all"
    holder.leave()
    await settled()
    assert states(a[0]) == ["in"]


async def test_a_slot_given_in_the_moment_of_leaving_is_not_lost() -> None:
    all_ = slots(most=1, most_each=1)
    (holder,) = await entered(all_, "a")
    unlucky, next_ = await entered(all_, "a", "b")
    holder.leave()  # serves the first who waits,
    unlucky.task.cancel()  # who is cancelled before it has run
    await settled()
    assert states(unlucky, next_) == ["left", "in"]
    assert all_.taken == 1


async def test_smaller_limits_hold_once_slots_come_back() -> None:
    all_ = slots(most=4, most_each=4)
    a = await entered(all_, *"aaaa")
    all_.limits = SlotLimits(1, 1, 10, 5)
    (b,) = await entered(all_, "b")
    for entry in a[:3]:
        entry.leave()
    await settled()
    assert b.state == "waits"
    a[3].leave()
    await settled()
    assert b.state == "in"


STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "leave", "cancel"]), st.sampled_from("abc"), st.integers(0, 9)),
    max_size=60,
)


@given(steps=STEPS)
def test_no_slot_is_lost_or_given_twice(steps: list[tuple[str, str, int]]) -> None:
    asyncio.run(play(steps))


async def play(steps: list[tuple[str, str, int]]) -> None:
    all_ = slots(most=3, most_each=2, most_waiting=6, most_waiting_each=4)
    entries: list[Entry] = []
    inside: list[Entry] = []
    for step, party, number in steps:
        if step == "enter":
            entries.append(Entry(all_, party))
        elif step == "leave" and inside:
            inside.pop(number % len(inside)).leave()
        elif step == "cancel" and entries:
            entries[number % len(entries)].task.cancel()
        await settled()
        inside += [entry for entry in entries if entry.state == "in"]
        entries = [entry for entry in entries if entry.state == "waits"]
        by_party = Counter(entry.party for entry in inside)
        assert all_.taken == len(inside) <= 3
        assert max(by_party.values(), default=0) <= 2
        assert all_.waiting == len(entries) <= 6
        # Nobody waits who could be served.
        assert all_.taken == 3 or all(by_party[entry.party] == 2 for entry in entries)
    for entry in [*entries, *inside]:
        entry.task.cancel()
    await settled()

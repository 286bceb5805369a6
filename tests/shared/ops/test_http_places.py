"""Who has to make room: never somebody whose source has less than the newcomer's, and the slow ones first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.ops.http_places import SLOW_S, Activity, source_of, to_evict

NOW = 100.0
MOVING, IDLE, WAITING, ANSWERING, LEAVING = Activity


@dataclass(frozen=True, eq=False)
class One:
    source: str
    activity: Activity = MOVING
    since: float = NOW


def test_as_long_as_there_is_room_nobody_has_to_go() -> None:
    """However many come from one address: it may be that of a whole node, or company."""
    crowd = [One("nat", MOVING, 0.0) for _ in range(10)]
    assert to_evict(crowd[-1], crowd, 10, NOW) is None
    assert to_evict(crowd[-1], [*crowd, *(One("nat", LEAVING) for _ in range(10))], 10, NOW) is None


def test_the_oldest_unfinished_goes_first() -> None:
    slow, slower = One("a", MOVING, NOW - SLOW_S), One("a", MOVING, NOW - 2 * SLOW_S)
    others = [One("a", IDLE, 0.0), One("a", ANSWERING, 0.0), One("a", MOVING, NOW - 0.1)]
    newcomer = One("a")
    for expected in (slower, slow):
        crowd = [one for one in (slow, slower, *others, newcomer) if one is expected or one not in (slower,)]
        assert to_evict(newcomer, crowd, len(crowd) - 1, NOW) is expected


def test_then_one_between_requests_then_one_that_has_just_begun() -> None:
    idle, idler = One("a", IDLE, NOW - 1), One("a", IDLE, NOW - 2)
    young, younger = One("a", MOVING, NOW - 0.2), One("a", MOVING, NOW - 0.1)
    newcomer = One("a")
    left = [younger, young, idle, idler, newcomer]
    for expected in (idler, idle, young, younger):
        assert to_evict(newcomer, left, len(left) - 1, NOW) is expected
        left.remove(expected)


def test_a_source_makes_room_for_its_own_newcomers() -> None:
    honest = One("honest", MOVING, 0.0)
    flood = [One("flood", MOVING, NOW - 0.01) for _ in range(9)]
    newcomer = One("flood")
    assert to_evict(newcomer, [honest, *flood, newcomer], 10, NOW) in flood
    newcomer = One("third")
    assert to_evict(newcomer, [honest, *flood, newcomer], 10, NOW) is honest, "slow, wherever it comes from"
    quick = One("honest", IDLE, 0.0)
    assert to_evict(newcomer, [quick, *flood, newcomer], 10, NOW) in flood


def test_a_source_whose_requests_are_all_answered_crowds_out_nobody() -> None:
    honest = One("honest", IDLE, 0.0)
    flood = [One("flood", ANSWERING, 0.0) for _ in range(9)]
    newcomer = One("flood")
    assert to_evict(newcomer, [honest, *flood, newcomer], 10, NOW) is None
    newcomer = One("third")
    assert to_evict(newcomer, [honest, *flood, newcomer], 10, NOW) is honest


def test_who_waits_for_an_answer_makes_room_for_a_source_with_fewer() -> None:
    waiting = [One("flood", WAITING, NOW - number) for number in range(4)]
    newcomer = One("flood")
    assert to_evict(newcomer, [*waiting, newcomer], 4, NOW) is None
    newcomer = One("other")
    assert to_evict(newcomer, [*waiting, newcomer], 4, NOW) is waiting[0], "the last one that came"
    idle = One("flood", IDLE, 0.0)
    assert to_evict(newcomer, [*waiting, idle, newcomer], 5, NOW) is idle


ONES = st.builds(One, st.sampled_from("abc"), st.sampled_from(Activity), st.floats(NOW - 1, NOW))


@given(st.lists(ONES, min_size=1, max_size=20), st.integers(0, 20), st.data())
def test_any_crowd(crowd: list[One], most: int, data: st.DataObject) -> None:
    newcomer = One(data.draw(st.sampled_from("abc")))
    crowd = [*crowd, newcomer]
    counted = [one for one in crowd if one.activity is not LEAVING]
    held = Counter(one.source for one in counted)
    victim = to_evict(newcomer, crowd, most, NOW)
    may_go = [
        one
        for one in counted
        if one is not newcomer
        and one.activity is not ANSWERING
        and held[one.source] >= held[newcomer.source] + (one.activity is WAITING)
    ]
    if len(counted) <= most or not may_go:
        assert victim is None
        return
    assert victim in may_go
    slow = [one for one in may_go if one.activity is MOVING and NOW - one.since >= SLOW_S]
    if slow:
        assert victim in slow
    moving = [one for one in may_go if one.activity is not WAITING]
    heaviest = max(held[one.source] for one in slow or moving or may_go)
    assert victim is not None and held[victim.source] == heaviest


@pytest.mark.parametrize(
    ("peer", "source"),
    [
        (("10.0.0.1", 1), "10.0.0.1"),
        (("::ffff:10.0.0.1", 1, 0, 0), "10.0.0.1"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::1", 1, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        (("::1", 1, 0, 0), "::/64"),
        (("no:address", 1), "no:address"),
        ("", ""),
        (None, ""),
        ((), ""),
    ],
)
def test_sources(peer: object, source: str) -> None:
    assert source_of(peer) == source

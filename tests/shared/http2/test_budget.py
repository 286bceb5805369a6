from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.http2.budget import Budget


def test_a_burst_then_a_steady_rate() -> None:
    budget = Budget(3, per_s=2)
    assert [budget.spend(10.0) for _ in range(4)] == [True, True, True, False]
    # Two seconds later three are back: one more was overdrawn before.
    assert [budget.spend(12.0) for _ in range(4)] == [True, True, True, False]


def test_it_never_holds_more_than_its_burst_by_waiting() -> None:
    budget = Budget(2, per_s=100)
    assert budget.spend(0.0)
    assert [budget.spend(1000.0) for _ in range(3)] == [True, True, False]


def test_what_is_left_can_be_seen() -> None:
    budget = Budget(3, per_s=2)
    assert budget.left(10.0) == 3
    for _ in range(4):
        budget.spend(10.0)
    assert budget.left(10.0) == -1
    assert budget.left(11.0) == 1
    assert budget.left(100.0) == 3


def test_what_is_earned_comes_on_top() -> None:
    budget = Budget(1, per_s=0)
    budget.earn(2)
    assert [budget.spend(0.0) for _ in range(4)] == [True, True, True, False]


def test_a_clock_that_jumps_back_gives_nothing_away() -> None:
    budget = Budget(1, per_s=1)
    assert budget.spend(100.0)
    assert not budget.spend(50.0)


@given(st.lists(st.floats(0, 10, allow_nan=False), max_size=50), st.integers(1, 10), st.integers(0, 10))
def test_nobody_gets_more_than_burst_and_rate_allow(gaps: list[float], burst: int, per_s: int) -> None:
    budget = Budget(burst, per_s)
    now = 0.0
    granted = 0
    for gap in gaps:
        now += gap
        granted += budget.spend(now)
    assert granted <= burst + per_s * now + 1e-6

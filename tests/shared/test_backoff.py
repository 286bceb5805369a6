"""Waits after failures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.backoff import doubled_s, half_or_more


def test_it_is_doubled_up_to_a_bound() -> None:
    waits = [round(doubled_s(0.1, 10.0, failures), 3) for failures in range(10)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]


@given(
    first=st.floats(0.001, 10), more=st.floats(0, 1e6), failures=st.integers(0, 10**9), chance=st.floats(0, 1)
)
def test_it_has_both_bounds(first: float, more: float, failures: int, chance: float) -> None:
    longest = doubled_s(first, first + more, failures)
    assert first <= longest <= first + more
    assert longest / 2 <= half_or_more(longest, chance) <= longest

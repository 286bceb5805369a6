"""The arithmetic of renewals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.credentials.certificates.renewal_schedule import RenewalRules

RULES = RenewalRules()
CHANCE = st.floats(0, 1)


@pytest.mark.parametrize(("chance", "due"), [(0.0, 150.0), (0.5, 145.0), (1.0, 140.0)])
def test_half_of_the_life_less_up_to_a_tenth(chance: float, due: float) -> None:
    assert RULES.due_at(100, 200, chance) == pytest.approx(due)


def test_a_life_that_ended_before_it_began_is_due_at_once() -> None:
    assert RULES.due_at(200, 100, 1.0) == 200


@given(share=st.floats(0.2, 0.9), start=st.floats(0, 4e9), life=st.floats(1, 1e8), chance=CHANCE)
def test_it_is_due_within_the_life(share: float, start: float, life: float, chance: float) -> None:
    rules = RenewalRules(share=share)
    due = rules.due_at(start, start + life, chance)
    assert start <= due <= start + share * life + 1e-3


@pytest.mark.parametrize(("failures", "pause"), [(1, 1), (2, 2), (3, 4), (9, 256), (10, 300), (1000, 300)])
def test_pauses_double_up_to_five_minutes(failures: int, pause: float) -> None:
    assert RULES.pause(failures, 1e6, 1.0) == pause
    assert RULES.pause(failures, 1e6, 0.0) == pause / 2
    assert RULES.pause(failures, 0, 1.0) == pause, "without a certificate likewise"


def test_what_is_left_of_a_life_has_room_for_some_attempts() -> None:
    assert RULES.pause(1000, 100, 1.0) == 25
    assert RULES.pause(1000, 0.1, 1.0) == 1


@given(failures=st.integers(1, 10_000), left=st.floats(-1e9, 1e9), chance=CHANCE)
def test_a_pause_has_both_bounds(failures: int, left: float, chance: float) -> None:
    pause = RULES.pause(failures, left, chance)
    assert RULES.first_pause_s / 2 <= pause <= RULES.most_pause_s
    if left > 8:
        assert pause <= left / 4

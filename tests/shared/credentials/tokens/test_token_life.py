"""When a token is sent, replaced and given up, told as times on a wall clock."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.credentials.tokens.minting import Minted
from shared.credentials.tokens.token_life import TokenLife
from shared.errors import TokenError
from tests.support.wall_clock import START

WHY = TokenError("why")


def born(lifetime_s: float = 3600.0, chance: float = 0.0, token: str = "one") -> TokenLife:
    life = TokenLife(lambda: chance)
    life.minted(Minted(token, START + lifetime_s), START)
    return life


def test_nothing_at_first() -> None:
    life = TokenLife(lambda: 0.0)
    assert not life.usable(START)
    assert life.remembered(START) is None
    assert life.refresh_at_s <= START


@pytest.mark.parametrize(
    ("lifetime_s", "chance", "refresh_after_s", "usable_for_s"),
    [
        (3600, 0.0, 3300, 3540),  # 5 minutes before
        (3600, 1.0, 3000, 3540),  # 10 minutes before
        (600, 0.0, 450, 540),  # a quarter before
        (600, 1.0, 300, 540),
        (10, 0.0, 7.5, 8),
        (10, 1.0, 5, 8),
        (1, 0.0, 0.8, 0.8),  # no sooner than after a second, but before it cannot be used
    ],
)
def test_the_times_of_a_life(
    lifetime_s: float, chance: float, refresh_after_s: float, usable_for_s: float
) -> None:
    life = born(lifetime_s, chance)
    assert life.refresh_at_s - START == pytest.approx(refresh_after_s)
    assert life.usable_until_s - START == pytest.approx(usable_for_s)
    assert life.usable(life.usable_until_s - 0.01)
    assert not life.usable(life.usable_until_s)
    assert life.length_s == lifetime_s


def test_a_token_that_comes_again_from_another_cache_is_asked_for_ever_closer_to_its_end() -> None:
    life = born(400)
    asked = []
    while life.refresh_at_s < START + 399:
        now = life.refresh_at_s
        asked.append(now - START)
        life.minted(Minted("one", START + 400), now)
    assert len(asked) < 12
    assert all(later - sooner >= 1 for sooner, later in pairwise(asked[:-2]))


def test_a_failure_answers_for_a_second_then_for_longer() -> None:
    life = TokenLife(lambda: 1.0)
    now = START
    for remembered_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        life.failed(WHY, now)
        assert life.remembered(now + remembered_s - 0.01) is WHY
        now += remembered_s
        assert life.remembered(now) is None
    life.minted(Minted("one", now + 3600), now)
    assert life.remembered(now) is None
    life.failed(WHY, now)
    assert life.remembered(now + 1) is None, "a success begins anew"


def test_attempts_behind_the_callers_backs_get_rarer() -> None:
    life = born(chance=1.0)
    now, pauses = life.refresh_at_s, []
    while now < START + 3540:
        life.failed(WHY, now)
        pauses.append(life.refresh_at_s - now)
        now = life.refresh_at_s
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert now == START + 3540, "when it cannot be used any more, there is an attempt in any case"
    assert life.token == "one"
    life.failed(WHY, now)
    assert life.token == ""


def test_while_one_is_asked_for_there_is_no_other_attempt() -> None:
    life = born()
    life.asking(life.refresh_at_s)
    assert life.refresh_at_s == START + 3360


def test_a_rejected_token_is_dropped() -> None:
    life = born()
    assert not life.rejected("another", START)
    assert life.usable(START)
    assert life.rejected("one", START + 1)
    assert not life.usable(START + 1)
    assert life.refresh_at_s == START + 1
    assert not life.rejected("one", START + 1), "it is gone already"


def test_its_successor_is_not_dropped_at_once() -> None:
    life = born()
    assert life.rejected("one", START)
    life.minted(Minted("two", START + 3600), START)
    assert not life.rejected("two", START + 9.9)
    assert life.rejected("two", START + 10)
    life.minted(Minted("three", START + 3600), START + 10)
    assert life.rejected("three", START - 3600), "the clock was set back"
    life.minted(Minted("four", START + 3600), START)
    assert life.rejected(None, START), "asked for by name: whoever says so knows"


@given(st.floats(0.001, 1e7), st.floats(0, 1), st.floats(0, 1e9))
def test_there_is_always_time_to_refresh(lifetime_s: float, chance: float, since_s: float) -> None:
    life = TokenLife(lambda: chance)
    life.minted(Minted("one", since_s + lifetime_s), since_s)
    assert since_s <= life.refresh_at_s <= life.usable_until_s <= since_s + lifetime_s

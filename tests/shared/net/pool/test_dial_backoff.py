"""How long a dial has to wait after failures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.net.pool.dial_backoff import (
    FIRST_S,
    FORGOTTEN_S,
    MOST_S,
    DialBackoff,
)


def test_it_is_doubled_up_to_a_bound() -> None:
    backoff = DialBackoff(lambda: 1.0)
    assert backoff.left(100.0) == 0
    waits = []
    now = 100.0
    for _ in range(10):
        backoff.failed(now, "refused")
        waits.append(round(backoff.left(now), 3))
        now += backoff.left(now)
        assert backoff.left(now) == 0
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]


def test_a_success_resets_it() -> None:
    backoff = DialBackoff(lambda: 1.0)
    for _ in range(5):
        backoff.failed(1.0, "refused")
    backoff.succeeded()
    assert (backoff.left(1.0), backoff.reason) == (0, "")
    backoff.failed(2.0, "reset")
    assert (round(backoff.left(2.0), 3), backoff.reason) == (FIRST_S, "reset")


def test_old_failures_are_forgotten() -> None:
    backoff = DialBackoff(lambda: 1.0)
    for _ in range(10):
        backoff.failed(100.0, "refused")
    backoff.failed(100.0 + FORGOTTEN_S + 1, "refused")
    assert round(backoff.left(100.0 + FORGOTTEN_S + 1), 3) == FIRST_S


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1)), max_size=200))
def test_it_is_never_longer(failures: list[tuple[float, float]]) -> None:
    chances = iter([chance for _, chance in failures])
    backoff = DialBackoff(lambda: next(chances))
    now = 0.0
    for after, chance in failures:
        now += after
        backoff.failed(now, "refused")
        assert 0 <= backoff.left(now) <= MOST_S * chance + 1e-9

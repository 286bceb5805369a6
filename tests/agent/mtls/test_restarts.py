"""Pauses grow as long as a program keeps dying, and begin anew after one that has run."""

from __future__ import annotations

from agent.mtls.restarts import LONGEST_PAUSE_S, STEADY_S, Restarts


def test_pauses_double_up_to_the_longest() -> None:
    restarts = Restarts()
    assert [restarts.pause_s(1.0) for _ in range(8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, LONGEST_PAUSE_S]


def test_one_that_has_run_for_a_minute_counts_as_the_first() -> None:
    restarts = Restarts()
    for _ in range(5):
        restarts.pause_s(0.1)
    assert [restarts.pause_s(STEADY_S), restarts.pause_s(0.1)] == [0.5, 1.0]

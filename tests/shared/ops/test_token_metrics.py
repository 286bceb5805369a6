"""Metrics of tokens, and the bound on their labels."""

from __future__ import annotations

import pytest

from shared.ops import token_metrics
from shared.ops.token_counts import TokenStatus
from shared.ops.token_metrics import TokenMetrics
from tests.support.wall_clock import START, Clock


def told(audience: str, minted_at_s: float | None, expires_at_s: float | None) -> TokenStatus:
    return TokenStatus("me", audience, minted_at_s, expires_at_s, "", None)


def samples(metrics: TokenMetrics, *tokens: TokenStatus) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("hbone_token_"), *sample.labels.values()): sample.value
        for family in metrics.families(tokens, kept=(len(tokens), 7), new=(2, 5))
        for sample in family.samples
    }


def test_all_of_them() -> None:
    clock = Clock()
    metrics = TokenMetrics(clock)
    counts = metrics.of("me", "a")
    assert metrics.of("me", "a") is counts
    counts.refreshed()
    counts.failed("refused")
    counts.failed("rejected")
    counts.failed("never heard of")
    clock.turn(60)
    assert samples(metrics, told("a", START, START + 3600)) == {
        ("age_seconds", "me", "a"): 60,
        ("expiry_timestamp_seconds", "me", "a"): START + 3600,
        ("refreshes_total", "me", "a", "success"): 1,
        ("refreshes_total", "me", "a", "failure"): 2,
        ("failures_total", "me", "a", "refused"): 1,
        ("failures_total", "me", "a", "rejected"): 1,
        ("failures_total", "me", "a", "other"): 1,
        ("entries",): 1,
        ("entries_limit",): 7,
        ("new_entries",): 2,
        ("new_entries_limit",): 5,
    }


def test_no_token_has_no_age() -> None:
    metrics = TokenMetrics(Clock())
    metrics.of("me", "a")
    names = {name for name, *_ in samples(metrics, told("a", None, None))}
    assert not names & {"age_seconds", "expiry_timestamp_seconds"}


def test_a_clock_that_was_set_back_makes_no_negative_age() -> None:
    metrics = TokenMetrics(Clock())
    metrics.of("me", "a")
    assert samples(metrics, told("a", START + 9, START + 99))["age_seconds", "me", "a"] == 0


def test_labels_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_metrics, "MAX_LABELS", 1)
    metrics = TokenMetrics(Clock())
    metrics.of("me", "a")
    metrics.of("me", "b").refreshed()
    metrics.of("me", "c").refreshed()
    assert metrics.of("me", "d") is metrics.of("other", "other")
    got = samples(
        metrics,
        told("a", START, START + 60),
        told("b", START - 1, START + 99),
        told("c", START - 5, START + 90),
    )
    assert got["refreshes_total", "other", "other", "success"] == 2
    assert got["age_seconds", "other", "other"] == 5, "the oldest"
    assert got["expiry_timestamp_seconds", "other", "other"] == START + 90, "the first to end"


def test_names_that_clients_make_up_leave_half_of_the_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_metrics, "MAX_LABELS", 4)
    metrics = TokenMetrics(Clock())
    others = [metrics.of("me", f"random-{number}", is_new=True) for number in range(4)]
    assert others[2] is others[3] is metrics.of("other", "other")
    assert metrics.of("me", "good") is not metrics.of("other", "other")
    assert metrics.of("me", "random-0", is_new=True) is others[0]

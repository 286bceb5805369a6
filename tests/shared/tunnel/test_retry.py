"""When a tunnel request is sent once more, for each outcome of an attempt, and the bounds of that."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.http2 import frames
from shared.tunnel.retry import (
    BACKOFF_S,
    CONNECTION_LOST,
    LOST_AT_ONCE,
    MAX_BACKOFF_S,
    MAX_RETRY_AFTER_S,
    MIN_BUDGET,
    PATIENCE_STATUSES,
    REASONS,
    REFUSED,
    REFUSED_AT_ONCE,
    STARTING_BACKOFF_S,
    TOKEN,
    Retries,
    Retry,
    RetryBudget,
    RetryRules,
    retry_after_s,
)

MANY = RetryRules(max_retries=20)
NEVER = RetryRules(max_retries=0)


def refused(retries: Retries) -> Retry | None:
    """What comes of a stream that is refused."""
    return retries.after_reset(frames.REFUSED_STREAM, connection_lost=False, answered_before=False)


def lost(retries: Retries) -> Retry | None:
    """What comes of a connection that is lost after it has answered."""
    return retries.after_reset(frames.CANCEL, connection_lost=True, answered_before=True)


def longest(rules: RetryRules = MANY) -> Retries:
    """Retries whose random numbers make every pause as long as it can be."""
    return Retries(rules, pick=lambda: 0.0)


# The rows.


def test_a_refused_stream_is_opened_again_at_once_and_then_with_pauses() -> None:
    retries = longest()
    came = [refused(retries) for _ in range(5)]
    assert came[:REFUSED_AT_ONCE] == [Retry(REFUSED)] * REFUSED_AT_ONCE
    assert came[REFUSED_AT_ONCE:] == [Retry(REFUSED, 0.25), Retry(REFUSED, 0.5), Retry(REFUSED, 1.0)]


def test_a_connection_that_answered_before_is_replaced() -> None:
    retries = longest(RetryRules(max_retries=1))
    for _ in range(LOST_AT_ONCE):
        assert lost(retries) == Retry(CONNECTION_LOST), (
            "which counts for nothing: it is dead, and gone from the pool"
        )
    assert lost(retries) is None
    assert retries.after_status(503, None) == Retry("503", 0.25)


@pytest.mark.parametrize(
    ("code", "connection_lost", "answered_before"),
    [
        (frames.CANCEL, True, False),  # a new connection
        (frames.CANCEL, False, True),  # the stream only
        (frames.PROTOCOL_ERROR, True, True),  # the connection, for the peer's fault
        (frames.INTERNAL_ERROR, False, True),
        (frames.NO_ERROR, False, True),
        (frames.ENHANCE_YOUR_CALM, False, True),
    ],
)
def test_any_other_reset_is_the_answer(code: int, connection_lost: bool, answered_before: bool) -> None:
    retries = longest()
    assert retries.after_reset(code, connection_lost=connection_lost, answered_before=answered_before) is None


def test_another_token_is_tried_once() -> None:
    retries = longest()
    assert retries.after_rejected_token() == Retry(TOKEN)
    assert retries.after_rejected_token() is None


@pytest.mark.parametrize("status", [100, 204, 301, 400, 401, 403, 404, 500, 501, 504, 0])
def test_any_other_status_is_the_answer(status: int) -> None:
    assert longest().after_status(status, None) is None
    assert longest().after_status(status, 1.0) is None


@pytest.mark.parametrize(("status", "reason"), PATIENCE_STATUSES.items())
def test_pauses_grow_up_to_a_bound(status: int, reason: str) -> None:
    retries = longest(RetryRules(max_retries=8))
    waits = []
    while retry := retries.after_status(status, None):
        assert retry.reason == reason
        waits.append(retry.wait_s)
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, MAX_BACKOFF_S, MAX_BACKOFF_S, MAX_BACKOFF_S]


def test_retry_after_is_the_least_pause() -> None:
    retries = longest()
    assert retries.after_status(429, 3.0) == Retry("429", 3.25)
    assert retries.after_status(429, None) == Retry("429", 0.5)
    assert retries.after_status(503, 0.0) == Retry("503", 1.0)


def test_pauses_are_spread() -> None:
    waits = set()
    for _ in range(100):
        retry = Retries(MANY).after_status(503, 1.0)
        assert retry is not None
        waits.add(retry.wait_s)
    assert len(waits) > 90
    assert min(waits) > 1.0 and max(waits) <= 1.0 + BACKOFF_S


# Bounds.

Outcome = Callable[[Retries], Retry | None]

OUTCOMES = st.sampled_from(
    [
        lambda retries: retries.after_status(429, None),
        lambda retries: retries.after_status(503, 7.0),
        lambda retries: retries.after_status(404, None),
        lambda retries: retries.after_rejected_token(),
        lambda retries: retries.after_reset(
            frames.REFUSED_STREAM, connection_lost=False, answered_before=True
        ),
        lost,
        lambda retries: retries.after_reset(frames.CANCEL, connection_lost=True, answered_before=False),
    ]
)


@given(st.integers(0, 8), st.lists(OUTCOMES, max_size=100))
def test_whatever_comes_there_is_an_end(most: int, outcomes: list[Outcome]) -> None:
    retries = Retries(RetryRules(max_retries=most))
    given_ = [retry for outcome in outcomes if (retry := outcome(retries)) is not None]
    assert all(retry.reason in REASONS for retry in given_)
    counted = [retry for retry in given_ if retry.reason != CONNECTION_LOST]
    assert len(counted) <= most
    assert len(given_) - len(counted) <= (LOST_AT_ONCE if most else 0)
    assert sum(retry.reason == TOKEN for retry in given_) <= 1
    for retry in given_:
        assert 0.0 <= retry.wait_s <= 7.0 + MAX_BACKOFF_S
        assert retry.wait_s or retry.reason in (REFUSED, CONNECTION_LOST, TOKEN)


def test_a_service_that_starts_is_asked_as_long_as_there_is_time() -> None:
    retries = longest(NEVER)
    came = [retries.while_starting("503") for _ in range(100)]
    assert [retry.wait_s for retry in came[:4]] == [0.25, 0.5, 1.0, STARTING_BACKOFF_S]
    assert {retry.wait_s for retry in came[4:]} == {STARTING_BACKOFF_S}
    assert all(retry.is_for_start and retry.reason in REASONS for retry in came)
    assert retries.while_starting("429", 7.0).wait_s == 7.0 + STARTING_BACKOFF_S


@given(OUTCOMES)
def test_none_at_all_if_so_told(outcome: Outcome) -> None:
    assert outcome(Retries(NEVER)) is None


def test_the_budget_is_a_share_of_the_requests_and_never_too_small() -> None:
    budget = RetryBudget()
    budget.retries = MIN_BUDGET - 1
    assert budget.has_room(0)
    budget.retries = MIN_BUDGET
    assert not budget.has_room(100)
    budget.requests = 1000
    assert budget.has_room(20) and not budget.has_room(1)
    budget.retries = 199
    assert budget.has_room(20)
    budget.retries = 200
    assert not budget.has_room(20)


# Retry-After.

NOW = 784111777.0
"""The example of RFC 9110 section 5.6.7: Sun, 06 Nov 1994 08:49:37 GMT."""


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"0", 0.0),
        (b"120", 120.0),
        (b" 7 ", 7.0),
        (b"3600", MAX_RETRY_AFTER_S),
        (b"3601", MAX_RETRY_AFTER_S),
        (b"9" * 5000, MAX_RETRY_AFTER_S),
        (b"Sun, 06 Nov 1994 08:50:07 GMT", 30.0),
        (b"Sunday, 06-Nov-94 08:50:07 GMT", 30.0),
        (b"Sun Nov  6 08:50:07 1994", 30.0),
        (b"Sun, 06 Nov 1994 08:49:37 GMT", 0.0),
        (b"Sun, 06 Nov 1994 08:00:00 GMT", 0.0),  # it has passed
        (b"Fri, 31 Dec 9999 23:59:59 GMT", MAX_RETRY_AFTER_S),
        (b"", None),
        (b"soon", None),
        (b"-1", None),
        (b"1.5", None),
        (b"1e3", None),
        (b"\xb2", None),  # a digit in Latin-1
        (b"Sun, 06 Nov 1994 08:50:07 CET", None),
        (b"Sun, 32 Nov 1994 08:50:07 GMT", None),
        (b"1994-11-06T08:50:07Z", None),
    ],
)
def test_what_retry_after_asks_for(value: bytes, seconds: float | None) -> None:
    assert retry_after_s(value, NOW) == seconds


@given(st.integers(0, 3600))
def test_every_date_of_the_next_hour(later_s: int) -> None:
    date = email.utils.formatdate(NOW + later_s, usegmt=True)
    assert retry_after_s(date.encode(), NOW) == later_s


@given(st.binary(max_size=60))
def test_whatever_is_there_is_seconds_or_nothing(value: bytes) -> None:
    seconds = retry_after_s(value, time.time())
    assert seconds is None or 0.0 <= seconds <= MAX_RETRY_AFTER_S


def test_rules_without_pauses_and_with_few_dead_connections() -> None:
    retries = longest(RetryRules(max_lost=1, pauses=False))
    assert retries.after_status(503, None) is None
    assert [lost(retries) is not None for _ in range(2)] == [True, False]
    came = [refused(retries) for _ in range(REFUSED_AT_ONCE + 1)]
    assert came == [Retry(REFUSED)] * REFUSED_AT_ONCE + [None]

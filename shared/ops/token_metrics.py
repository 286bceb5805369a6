"""Metrics of tokens: how old, until when, how often replaced, and why not.

Owned here: their names and labels, and the bound on label values, for an audience may have a client's name
filled in. What is counted is `shared/ops/token_counts.py`'s. It imports prometheus_client, so import it
only where metrics are served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.errors import TOKEN_REASONS
from shared.ops.metrics import MAX_LABELS, OTHER
from shared.ops.token_counts import TokenCounts, TokenStatus

_LABELS = ("identity", "audience")

Key = tuple[str, str]


class TokenMetrics:
    """The counts of each identity and audience."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """`now` is the wall clock in seconds since 1970."""
        self._now = now
        self._counts: dict[Key, TokenCounts] = {}

    def of(self, identity: str, audience: str, is_new: bool = False) -> TokenCounts:
        """The counts of these tokens; hold on to them. MAX_LABELS are counted apart, half of them only for
        those that are not new: names that clients have made up leave them free."""
        key = (identity, audience)
        if key not in self._counts and len(self._counts) >= (MAX_LABELS // 2 if is_new else MAX_LABELS):
            key = (OTHER, OTHER)
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = TokenCounts()
        return counts

    def families(
        self, tokens: Iterable[TokenStatus], kept: tuple[int, int], new: tuple[int, int]
    ) -> Iterator[Metric]:
        """All of it, with what may be told of the tokens that there are now; `kept` are the minted ones that
        are kept and how many may be, `new` those that are new and how many may be."""
        minted, ends = self._worst(tokens)
        now = self._now()
        age = GaugeMetricFamily("hbone_token_age_seconds", "Since the token is there.", labels=_LABELS)
        for key, minted_at_s in minted.items():
            age.add_metric(key, max(0.0, now - minted_at_s))
        expiry = GaugeMetricFamily(
            "hbone_token_expiry_timestamp_seconds", "When the token ends.", labels=_LABELS
        )
        for key, ends_at_s in ends.items():
            expiry.add_metric(key, ends_at_s)
        refreshes = CounterMetricFamily(
            "hbone_token_refreshes", "Attempts to get a new token.", labels=(*_LABELS, "result")
        )
        failures = CounterMetricFamily(
            "hbone_token_failures",
            "Tokens that could not be had, or were rejected.",
            labels=(*_LABELS, "reason"),
        )
        for key, counts in self._counts.items():
            refreshes.add_metric((*key, "success"), counts.refreshes_total)
            refreshes.add_metric((*key, "failure"), counts.refreshes_failed_total)
            for reason, count in counts.failures_by_reason.items():
                failures.add_metric((*key, reason if reason in TOKEN_REASONS else OTHER), count)
        yield from (age, expiry, refreshes, failures)
        for name, documentation, value in (
            ("entries", "Minted tokens that are kept, but for new ones.", kept[0]),
            ("entries_limit", "Those that may be kept.", kept[1]),
            ("new_entries", "Minted tokens that are kept and that no service has accepted yet.", new[0]),
            ("new_entries_limit", "Those that may be kept.", new[1]),
        ):
            yield GaugeMetricFamily(f"hbone_token_{name}", documentation, value=value)

    def _worst(self, tokens: Iterable[TokenStatus]) -> tuple[dict[Key, float], dict[Key, float]]:
        """When tokens were minted and when they end, by their labels: of several the first."""
        minted: dict[Key, float] = {}
        ends: dict[Key, float] = {}
        for token in tokens:
            key = (token.identity, token.audience)
            key = key if key in self._counts else (OTHER, OTHER)
            for times, at_s in ((minted, token.minted_at_s), (ends, token.expires_at_s)):
                if at_s is not None:
                    times[key] = min(at_s, times.get(key, at_s))
        return minted, ends

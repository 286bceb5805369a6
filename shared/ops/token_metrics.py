"""Metrics of tokens: how old, until when, how often replaced, and why not.

Their label values are bounded, for an audience may have a client's name filled in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Metric

from shared.errors import TOKEN_REASONS
from shared.ops import families
from shared.ops.metrics import MAX_LABELS, OTHER, bounded
from shared.ops.token_counts import TokenCounts, TokenStatus

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
        most = MAX_LABELS // 2 if is_new else MAX_LABELS
        return bounded(self._counts, (identity, audience), (OTHER, OTHER), TokenCounts, most)

    def families(
        self, tokens: Iterable[TokenStatus], kept: tuple[int, int], new: tuple[int, int]
    ) -> Iterator[Metric]:
        """All of it, with what may be told of the tokens that there are now; `kept` are the minted ones that
        are kept and how many may be, `new` those that are new and how many may be."""
        minted, ends = self._worst(tokens)
        now, counts = self._now(), self._counts.items()
        yield families.TOKEN_AGE.metric((*key, max(0.0, now - at_s)) for key, at_s in minted.items())
        yield families.TOKEN_EXPIRY.metric((*key, at_s) for key, at_s in ends.items())
        yield families.TOKEN_REFRESHES.metric(
            row
            for key, c in counts
            for row in (
                (*key, "success", c.refreshes_total),
                (*key, "failure", c.refreshes_failed_total),
            )
        )
        yield families.TOKEN_FAILURES.metric(
            (*key, reason if reason in TOKEN_REASONS else OTHER, n)
            for key, c in counts
            for reason, n in c.failures_by_reason.items()
        )
        yield families.TOKEN_ENTRIES.value(kept[0])
        yield families.TOKEN_ENTRIES_LIMIT.value(kept[1])
        yield families.TOKEN_NEW_ENTRIES.value(new[0])
        yield families.TOKEN_NEW_ENTRIES_LIMIT.value(new[1])

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

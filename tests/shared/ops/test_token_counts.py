"""What is counted of tokens."""

from __future__ import annotations

from shared.ops.token_counts import TokenCounts


def test_a_rejected_token_is_no_failed_refresh() -> None:
    counts = TokenCounts()
    counts.refreshed()
    counts.failed("refused")
    counts.failed("refused")
    counts.failed("rejected")
    assert counts.refreshes_total == 1
    assert counts.refreshes_failed_total == 2
    assert counts.failures_by_reason == {"refused": 2, "rejected": 1}

"""The counts of an origin."""

from __future__ import annotations

import pytest

from shared.ops.pool_counts import (
    AGE,
    LOST,
    REASONS,
    OriginCounts,
)


def test_what_is_open_follows() -> None:
    counts = OriginCounts()
    for _ in range(3):
        counts.opened()
    counts.closed()
    counts.closed(AGE)
    assert (counts.open, counts.opened_total) == (1, 3)
    assert {reason for reason, count in counts.closed_by_reason.items() if count} == {LOST, AGE}


def test_reasons_are_a_closed_set() -> None:
    assert set(OriginCounts().closed_by_reason) == set(REASONS)
    with pytest.raises(KeyError):
        OriginCounts().closed("tired")

"""Metrics are declared in one place, with the values that their labels can have."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.hbone.hbone_tokens import GOOD, NO_KEYS
from shared.net.names import dns_query
from shared.ops import families, http_server
from shared.ops.families import FAMILIES, Family
from shared.trust import jwt_check
from shared.tunnel import retry

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("family", "label", "values"),
    [
        (families.RETRIES, "reason", retry.REASONS),
        (families.DNS_LOOKUPS, "result", ("found", "abandoned", *dns_query.KINDS)),
        (families.JWT_CHECKS, "result", (GOOD, *jwt_check.KINDS, NO_KEYS)),
        (families.OPS_REFUSALS, "reason", tuple(http_server.REFUSALS)),
    ],
)
def test_closed_sets_are_those_of_the_code(family: Family, label: str, values: tuple[str, ...]) -> None:
    assert family.labels[label] == values


def test_no_metric_is_declared_twice_or_elsewhere() -> None:
    names = [family.name for family in FAMILIES]
    assert sorted(set(names)) == sorted(names)
    makers = {
        str(path.relative_to(ROOT))
        for program in ("gateway", "agent", "hbone", "shared")
        for path in (ROOT / program).rglob("*.py")
        if "MetricFamily(" in (text := path.read_text()) or "prometheus_client.Gauge(" in text
    }
    assert makers <= {"shared/ops/metrics.py"}

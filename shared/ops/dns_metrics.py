"""Metrics of look-ups: what came of them, how long they took, how many there are, and their bounds.

Imports prometheus_client: to be imported only where metrics are served.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.ops.lookup_counts import ResolverNumbers


def families(resolver: ResolverNumbers) -> Iterator[Metric]:
    """All of it; the look-ups that clients cause are told apart from those of our own settings."""
    counts = resolver.counts
    ended = CounterMetricFamily("hbone_dns_lookups", "Look-ups, by what came of them.", labels=["result"])
    for result, count in {"found": counts.found, "abandoned": counts.abandoned, **counts.failed}.items():
        ended.add_metric([result], count)
    yield ended
    yield CounterMetricFamily("hbone_dns_lookup_seconds", "That they took together.", value=counts.seconds)
    yield CounterMetricFamily(
        "hbone_dns_lookups_reused", "Questions answered by another one's look-up.", value=counts.reused
    )
    gauges = [
        GaugeMetricFamily(f"hbone_dns_{name}", documentation, labels=["for"])
        for name, documentation in (
            ("lookups_running", "Look-ups under way."),
            ("lookups_limit", "Those that may be."),
            ("lookups_waiting", "Look-ups that wait for others to end."),
            ("lookups_waiting_limit", "Those that may."),
        )
    ]
    for party, slots in (("clients", resolver.clients), ("settings", resolver.settings)):
        for gauge, number in zip(gauges, slots, strict=True):
            gauge.add_metric([party], number)
    yield from gauges
    yield GaugeMetricFamily("hbone_dns_answers", "Answers that are kept.", value=resolver.kept)
    yield GaugeMetricFamily("hbone_dns_answers_limit", "Those that may be kept.", value=resolver.most_kept)

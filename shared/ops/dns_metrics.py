"""Metrics of look-ups: what came of them, how long they took, how many there are, and their bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shared.ops import families as metrics
from shared.ops.lookup_counts import ResolverNumbers

if TYPE_CHECKING:
    from prometheus_client import Metric


def families(resolver: ResolverNumbers) -> Iterator[Metric]:
    """All of it; the look-ups that clients cause are told apart from those of our own settings."""
    counts = resolver.counts
    results = {"found": counts.found, "abandoned": counts.abandoned, **counts.failed}
    yield metrics.DNS_LOOKUPS.metric(results.items())
    yield metrics.DNS_LOOKUP_SECONDS.value(counts.seconds)
    yield metrics.DNS_LOOKUPS_REUSED.value(counts.reused)
    clients, settings = resolver.clients, resolver.settings
    for family, of_clients, of_settings in (
        (metrics.DNS_RUNNING, clients.running, settings.running),
        (metrics.DNS_RUNNING_LIMIT, clients.most_running, settings.most_running),
        (metrics.DNS_WAITING, clients.waiting, settings.waiting),
        (metrics.DNS_WAITING_LIMIT, clients.most_waiting, settings.most_waiting),
    ):
        yield family.metric([("clients", of_clients), ("settings", of_settings)])
    yield metrics.DNS_ANSWERS.value(resolver.kept)
    yield metrics.DNS_ANSWERS_LIMIT.value(resolver.most_kept)

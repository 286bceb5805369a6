"""Counts of tunnels and connections, and the text that a scrape gets of all metrics.

It imports prometheus_client, so import it only where metrics are counted or served.

What is counted per tunnel is kept in plain integers, one object per route and origin, fetched once and held
by the tunnel: an addition costs tens of nanoseconds, one to a prometheus_client counter 0.23 microseconds
and a look-up of its labels as much again. A scrape turns them into metrics. What follows from other numbers
(tunnels open, Istio's names) is computed there and so cannot disagree with them.

`sent` means towards the service and `received` from it, as in the access log. Istio's names mean the
opposite: there the bytes of the response are the sent ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TypeVar

import prometheus_client
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from shared.errors import Flag
from shared.ops import families
from shared.ops.families import Family
from shared.ops.pool_counts import OriginCounts

K = TypeVar("K")
C = TypeVar("C")

MAX_LABELS = 1000
"""Distinct routes, and distinct origins, that are counted apart; later ones are counted as OTHER."""

OTHER = "other"
UNKNOWN = "unknown"
"""What Istio calls a label value that is not known."""

SETUP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""From a stream on a pooled connection (1 ms) to a cold start of the service (seconds)."""

LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""From an idle loop to one that stands still."""

_OPENMETRICS = "application/openmetrics-text"

_COMPONENT, _REPORTER = "gateway", "source"
"""Istio's words for hgate, and for the end of a tunnel that it stands at."""


class RouteCounts:
    """What happened to one route's tunnels since the start. The relay adds bytes as they pass."""

    __slots__ = (
        "closed_by_flag",
        "opened_total",
        "received_bytes",
        "retries_by_reason",
        "retries_over_budget",
        "sent_bytes",
    )

    def __init__(self) -> None:
        self.closed_by_flag = {Flag.NONE: 0}
        self.opened_total = 0
        self.sent_bytes = 0
        """Bytes towards the service."""
        self.received_bytes = 0
        """Bytes from the service."""
        self.retries_by_reason: dict[str, int] = {}
        self.retries_over_budget = 0
        """Retries that were not made because there were too many."""

    @property
    def open(self) -> int:
        """Tunnels that are open now."""
        return self.opened_total - sum(self.closed_by_flag.values())

    def opened(self) -> None:
        """A tunnel has opened; `closed` follows exactly once."""
        self.opened_total += 1

    def closed(self, flag: Flag = Flag.NONE) -> None:
        """A tunnel has ended; `flag` says how, as in the access log."""
        self.closed_by_flag[flag] = self.closed_by_flag.get(flag, 0) + 1

    def retried(self, reason: str) -> None:
        """A tunnel request is sent once more; `reason` is one of `shared.tunnel.retry.REASONS`."""
        self.retries_by_reason[reason] = self.retries_by_reason.get(reason, 0) + 1


class TunnelMetrics:
    """All metrics of one process, in a registry of its own. All calls are made on the event loop's thread."""

    def __init__(self) -> None:
        self._routes: dict[str, RouteCounts] = {}
        self._origins: dict[str, OriginCounts] = {}
        self._refused = dict.fromkeys(sorted(set(Flag) - {Flag.NONE}), 0)
        self._registry = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self._registry)
        self.tunnel_setup = self.histogram(families.TUNNEL_SETUP, SETUP_BUCKETS_S)
        """To be called with the seconds that a tunnel took to open."""
        self._registry.register(Scrape(self._families))

    @property
    def routes(self) -> Mapping[str, RouteCounts]:
        """The counts of the routes that have had a tunnel."""
        return self._routes

    def route(self, host: str) -> RouteCounts:
        """The counts of the route with the host glob `host`; hold on to them."""
        return bounded(self._routes, host, OTHER, RouteCounts)

    def origin(self, name: str) -> OriginCounts:
        """The counts of the origin `name`; hold on to them."""
        return bounded(self._origins, name, OTHER, OriginCounts)

    def refused(self, flag: Flag) -> None:
        """A connection was turned away before it had a tunnel; `flag` says why."""
        self._refused[flag] += 1

    def histogram(self, family: Family, buckets: tuple[float, ...]) -> Callable[[float], None]:
        """Adds the histogram `family`, which has no labels; what is returned counts one value."""
        made = prometheus_client.Histogram(family.name, family.help, buckets=buckets, registry=self._registry)
        return made.observe

    def watch(self, gauge: Family, read: Callable[[], float]) -> None:
        """Adds `gauge`, which has no labels; every scrape calls `read`."""
        prometheus_client.Gauge(gauge.name, gauge.help, registry=self._registry).set_function(read)

    def add(self, collect: Callable[[], Iterator[Metric]]) -> None:
        """Adds the metrics that `collect` makes of other numbers, at every scrape."""
        self._registry.register(Scrape(collect))

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now, for who sums them over several processes."""
        return iter(self._registry.collect())

    def render(self, accept: str) -> tuple[str, bytes]:
        """The content type and body of a scrape: OpenMetrics if `accept` (a request's header) names it."""
        return render(self._registry, accept)

    def _families(self) -> Iterator[Metric]:
        routes, origins = self._routes.items(), self._origins.items()
        yield families.TUNNELS_OPENED.metric((route, c.opened_total) for route, c in routes)
        yield families.TUNNELS_CLOSED.metric(
            (route, flag, n) for route, c in routes for flag, n in c.closed_by_flag.items()
        )
        yield families.TUNNELS_OPEN.metric((route, c.open) for route, c in routes)
        yield families.SENT_BYTES.metric((route, c.sent_bytes) for route, c in routes)
        yield families.RECEIVED_BYTES.metric((route, c.received_bytes) for route, c in routes)
        yield families.RETRIES.metric(
            (route, reason, n) for route, c in routes for reason, n in c.retries_by_reason.items()
        )
        yield families.RETRIES_OVER_BUDGET.metric((route, c.retries_over_budget) for route, c in routes)
        yield families.CONNECTIONS_REFUSED.metric(self._refused.items())
        yield families.UPSTREAM_CONNECTIONS.metric((name, c.open) for name, c in origins)
        yield families.UPSTREAM_CONNECTIONS_OPENED.metric((name, c.opened_total) for name, c in origins)
        yield families.UPSTREAM_CONNECTIONS_CLOSED.metric(
            (name, reason, n) for name, c in origins for reason, n in c.closed_by_reason.items()
        )
        yield families.UPSTREAM_CONNECTIONS_DRAINING.metric((name, c.draining) for name, c in origins)
        yield families.UPSTREAM_DIALS_FAILED.metric((name, c.dials_failed_total) for name, c in origins)
        yield families.UPSTREAM_WAITING.metric((name, c.waiting) for name, c in origins)
        yield families.UPSTREAM_WAITING_REFUSED.metric((name, c.refused_total) for name, c in origins)
        yield from self._istio_families()

    def _istio_families(self) -> Iterator[Metric]:
        routes = self._routes.values()
        opened = sum(c.opened_total for c in routes)
        closed = Counter({Flag.NONE: 0})
        for counts in routes:
            closed.update(counts.closed_by_flag)
        to_client = sum(c.received_bytes for c in routes)
        from_client = sum(c.sent_bytes for c in routes)
        yield families.ISTIO_OPENED.metric([(_REPORTER, Flag.NONE, opened)])
        yield families.ISTIO_CLOSED.metric((_REPORTER, flag, n) for flag, n in closed.items())
        yield families.ISTIO_SENT_BYTES.metric([(_REPORTER, Flag.NONE, to_client)])
        yield families.ISTIO_RECEIVED_BYTES.metric([(_REPORTER, Flag.NONE, from_client)])
        yield families.ISTIO_BUILD.metric([(_COMPONENT, _tag(), 1)])


def render(metrics: Collector, accept: str) -> tuple[str, bytes]:
    """The content type and body of a scrape: OpenMetrics if `accept` (a request's header) names it."""
    # The library is told what we chose, not the header: it would answer with the version it finds there.
    encoder, content_type = choose_encoder(format_of(accept))
    return content_type, encoder(metrics)


def format_of(accept: str) -> str:
    """What such a header asks for: OpenMetrics' media type, or "" for Prometheus' text."""
    return _OPENMETRICS if _OPENMETRICS in accept.lower() else ""


class Scrape(Collector):
    """Metrics that `families` makes whenever somebody asks."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families()


def bounded(table: dict[K, C], key: K, other: K, make: Callable[[], C], most: int = MAX_LABELS) -> C:
    """The counts of `key` in `table`, made when they are first asked for; once there are `most`, those of
    `other` for every new key."""
    if key not in table and len(table) >= most:
        key = other
    counts = table.get(key)
    if counts is None:
        counts = table[key] = make()
    return counts


@cache
def _tag() -> str:
    # At the first scrape: 3 ms and 1.2 MiB that a start can spare.
    from shared import version

    return version.installed() or UNKNOWN

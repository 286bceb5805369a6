"""Counts of tunnels and connections, as Prometheus metrics.

Owned here: the metrics' names and labels, the bounds on label values, and the text that a scrape gets. Not
owned: the port they are served on (`http_server.py`). It imports prometheus_client, so import it only where
metrics are counted or served.

What is counted per tunnel is kept in plain integers, one object per route and origin, fetched once and held
by the tunnel: an addition costs tens of nanoseconds, one to a prometheus_client counter 0.23 microseconds
and a look-up of its labels as much again. A scrape turns them into metrics. What follows from other numbers
(tunnels open, Istio's names) is computed there and so cannot disagree with them.

`sent` means towards the service and `received` from it, as in the access log. Istio's names mean the
opposite: there the bytes of the response are the sent ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from shared.errors import HboneError
from shared.ops.pool_counts import OriginCounts

MAX_LABELS = 1000
"""Distinct routes, and distinct origins, that are counted apart; later ones are counted as OTHER."""

OTHER = "other"
UNKNOWN = "unknown"
"""What Istio calls a label value that is not known."""

NO_FLAG = "-"
"""The response flag of a tunnel that ended well."""

SETUP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""From a stream on a pooled connection (1 ms) to a cold start of the service (seconds)."""

_OPENMETRICS = "application/openmetrics-text"

_REPORTERS = {"gateway": "source", "agent": "destination"}
"""Istio's word for the end of the tunnel that a component stands at."""


def response_flags() -> frozenset[str]:
    """Every flag of shared/errors.py, and NO_FLAG: the closed set of values of the label `flags`."""
    flags = {NO_FLAG}
    classes: list[type[HboneError]] = [HboneError]
    while classes:
        one = classes.pop()
        flags.add(one.flag)
        classes.extend(one.__subclasses__())
    return frozenset(flags)


class RouteCounts:
    """What happened to one route's tunnels since the start. The relay adds bytes as they pass."""

    __slots__ = (
        "_flags",
        "closed_by_flag",
        "opened_total",
        "received_bytes",
        "retries_by_reason",
        "retries_over_budget",
        "sent_bytes",
    )

    def __init__(self, flags: frozenset[str]) -> None:
        self._flags = flags
        self.closed_by_flag: dict[str, int] = {NO_FLAG: 0}
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

    def closed(self, flag: str = NO_FLAG) -> None:
        """A tunnel has ended; `flag` says how, as in the access log."""
        flag = flag if flag in self._flags else UNKNOWN
        self.closed_by_flag[flag] = self.closed_by_flag.get(flag, 0) + 1

    def retried(self, reason: str) -> None:
        """A tunnel request is sent once more; `reason` is one of `shared.tunnel.retry.REASONS`."""
        self.retries_by_reason[reason] = self.retries_by_reason.get(reason, 0) + 1


class TunnelMetrics:
    """All metrics of one process, in a registry of its own. All calls are made on the event loop's thread."""

    def __init__(self, component: str, *, more_flags: Iterable[str] = ()) -> None:
        """`component` is gateway or agent; `more_flags` are flags beside those of shared/errors.py."""
        self.flags = response_flags() | frozenset(more_flags)
        self._component = component
        self._reporter = _REPORTERS.get(component, UNKNOWN)
        self._routes: dict[str, RouteCounts] = {}
        self._origins: dict[str, OriginCounts] = {}
        self._refused = dict.fromkeys(sorted(self.flags - {NO_FLAG}), 0)
        self._registry = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self._registry)
        self._setup = prometheus_client.Histogram(
            "hbone_tunnel_setup_seconds",
            "From the client's first byte to the open tunnel.",
            buckets=SETUP_BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(Scrape(self._families))

    def route(self, host: str) -> RouteCounts:
        """The counts of the route with the host glob `host`; hold on to them."""
        key = _bounded(host, self._routes)
        counts = self._routes.get(key)
        if counts is None:
            counts = self._routes[key] = RouteCounts(self.flags)
        return counts

    def origin(self, name: str) -> OriginCounts:
        """The counts of the origin `name`; hold on to them."""
        key = _bounded(name, self._origins)
        counts = self._origins.get(key)
        if counts is None:
            counts = self._origins[key] = OriginCounts()
        return counts

    def refused(self, flag: str) -> None:
        """A connection was turned away before it had a tunnel; `flag` says why."""
        flag = flag if flag in self._refused else UNKNOWN
        self._refused[flag] = self._refused.get(flag, 0) + 1

    def tunnel_setup(self, seconds: float) -> None:
        """A tunnel took `seconds` to open."""
        self._setup.observe(seconds)

    def watch(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """Adds the gauge `name`; every scrape calls `read`. For bounds, and for what came up against them."""
        gauge = prometheus_client.Gauge(name, documentation, registry=self._registry)
        gauge.set_function(read)

    def add(self, families: Callable[[], Iterator[Metric]]) -> None:
        """Adds the metrics that `families` makes of other numbers, at every scrape."""
        self._registry.register(Scrape(families))

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now, for who sums them over several processes."""
        return iter(self._registry.collect())

    def render(self, accept: str) -> tuple[str, bytes]:
        """The content type and body of a scrape: OpenMetrics if `accept` (a request's header) names it."""
        return render(self._registry, accept)

    def _families(self) -> Iterator[Metric]:
        routes, origins = self._routes.items(), self._origins.items()
        by_route, by_origin = ("route",), ("origin",)
        yield _counter("hbone_tunnels_opened", by_route, ((route, c.opened_total) for route, c in routes))
        yield _counter(
            "hbone_tunnels_closed",
            ("route", "flags"),
            ((route, flag, n) for route, c in routes for flag, n in c.closed_by_flag.items()),
        )
        yield _gauge("hbone_tunnels_open", by_route, ((route, c.open) for route, c in routes))
        yield _counter("hbone_sent_bytes", by_route, ((route, c.sent_bytes) for route, c in routes))
        yield _counter("hbone_received_bytes", by_route, ((route, c.received_bytes) for route, c in routes))
        yield _counter(
            "hbone_upstream_retries",
            ("route", "reason"),
            ((route, reason, n) for route, c in routes for reason, n in c.retries_by_reason.items()),
        )
        yield _counter(
            "hbone_upstream_retries_over_budget",
            by_route,
            ((route, c.retries_over_budget) for route, c in routes),
        )
        yield _counter("hbone_connections_refused", ("flags",), self._refused.items())
        yield _gauge("hbone_upstream_connections", by_origin, ((name, c.open) for name, c in origins))
        yield _counter(
            "hbone_upstream_connections_opened", by_origin, ((name, c.opened_total) for name, c in origins)
        )
        yield _counter(
            "hbone_upstream_connections_closed",
            ("origin", "reason"),
            ((name, reason, n) for name, c in origins for reason, n in c.closed_by_reason.items()),
        )
        yield _gauge(
            "hbone_upstream_connections_draining", by_origin, ((name, c.draining) for name, c in origins)
        )
        yield _counter(
            "hbone_upstream_dials_failed", by_origin, ((name, c.dials_failed_total) for name, c in origins)
        )
        yield _gauge("hbone_upstream_waiting", by_origin, ((name, c.waiting) for name, c in origins))
        yield _counter(
            "hbone_upstream_waiting_refused", by_origin, ((name, c.refused_total) for name, c in origins)
        )
        yield from self._istio_families()

    def _istio_families(self) -> Iterator[Metric]:
        labels = ("reporter", "response_flags")
        routes = self._routes.values()
        opened = sum(c.opened_total for c in routes)
        closed = Counter({NO_FLAG: 0})
        for counts in routes:
            closed.update(counts.closed_by_flag)
        to_client = sum(c.received_bytes for c in routes)
        from_client = sum(c.sent_bytes for c in routes)
        me = self._reporter
        yield _counter("istio_tcp_connections_opened", labels, [(me, NO_FLAG, opened)])
        yield _counter("istio_tcp_connections_closed", labels, ((me, flag, n) for flag, n in closed.items()))
        yield _counter("istio_tcp_sent_bytes", labels, [(me, NO_FLAG, to_client)])
        yield _counter("istio_tcp_received_bytes", labels, [(me, NO_FLAG, from_client)])
        yield _gauge("istio_build", ("component", "tag"), [(self._component, _tag(), 1)])


def render(metrics: Collector, accept: str) -> tuple[str, bytes]:
    """The content type and body of a scrape: OpenMetrics if `accept` (a request's header) names it."""
    # The library is told what we chose, not the header: it would answer with the version it finds there.
    encoder, content_type = choose_encoder(format_of(accept))
    return content_type, encoder(metrics)


def format_of(accept: str) -> str:
    """What such a header asks for: OpenMetrics' media type, or "" for Prometheus' text."""
    return _OPENMETRICS if _OPENMETRICS in accept.lower() else ""


class Scrape(Collector):
    """Lets a scrape ask for metrics that are made when it comes, by calling `families`."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families()


# What the metrics made from plain integers mean; `_total` is added to counters.
_DOCUMENTATION = {
    "hbone_tunnels_opened": "Tunnels opened.",
    "hbone_tunnels_closed": "Tunnels ended, by response flag.",
    "hbone_tunnels_open": "Tunnels that are open now.",
    "hbone_sent_bytes": "Bytes carried towards the service.",
    "hbone_received_bytes": "Bytes carried from the service.",
    "hbone_upstream_retries": "Tunnel requests sent once more, by what came of the one before.",
    "hbone_upstream_retries_over_budget": "Tunnel requests not sent once more: too many were retries.",
    "hbone_connections_refused": "Connections turned away before they had a tunnel, by response flag.",
    "hbone_upstream_connections": "HTTP/2 connections that are open now.",
    "hbone_upstream_connections_opened": "HTTP/2 connections opened.",
    "hbone_upstream_connections_closed": "HTTP/2 connections ended, by why they took no new streams.",
    "hbone_upstream_connections_draining": "HTTP/2 connections that are open and take no new streams.",
    "hbone_upstream_dials_failed": "Connections that could not be made, or ended before HTTP/2 was spoken.",
    "hbone_upstream_waiting": "Tunnels that wait for a connection, or for room on one.",
    "hbone_upstream_waiting_refused": "Tunnels that were not let to wait, because too many did.",
    "istio_tcp_connections_opened": "Tunnels opened, as Istio counts connections.",
    "istio_tcp_connections_closed": "Tunnels ended, as Istio counts connections.",
    "istio_tcp_sent_bytes": "Bytes of responses: carried towards the client.",
    "istio_tcp_received_bytes": "Bytes of requests: carried from the client.",
    "istio_build": "Component and version; always 1.",
}


def _counter(name: str, labels: tuple[str, ...], rows: Iterable[tuple[str | int, ...]]) -> Metric:
    return _filled(CounterMetricFamily(name, _DOCUMENTATION[name], labels=labels), rows)


def _gauge(name: str, labels: tuple[str, ...], rows: Iterable[tuple[str | int, ...]]) -> Metric:
    return _filled(GaugeMetricFamily(name, _DOCUMENTATION[name], labels=labels), rows)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, rows: Iterable[tuple[str | int, ...]]) -> Metric:
    """`family` with a sample for each row, its label values before its number."""
    for *values, number in rows:
        family.add_metric([str(value) for value in values], float(number))
    return family


def _bounded(name: str, table: Mapping[str, object]) -> str:
    return name if name in table or len(table) < MAX_LABELS else OTHER


@cache
def _tag() -> str:
    # At the first scrape: 3 ms and 1.2 MiB that a start can spare.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("hbone")
    except PackageNotFoundError:
        return UNKNOWN

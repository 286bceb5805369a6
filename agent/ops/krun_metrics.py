"""What krun counts, and the metrics that a scrape makes of it.

Counting costs no import: prometheus_client is imported at the first scrape. What is open is looked at then,
so tunnels count their bytes as they pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.errors import Flag
from shared.ops import families
from shared.tunnel.tunnel_record import TunnelRecord

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

    from agent.egress.egress import Egress
    from agent.egress.egress_tunnel import EgressTunnel
    from agent.egress.plain_requests import PlainExchange
    from agent.memory import Memory
    from agent.mtls.mtls_end import MtlsEnd
    from agent.tunnels.remote_ports import RemoteConnection
    from agent.tunnels.requests import Requests
    from shared.tunnel.tunnel_server import ServedTunnel

PREFIX = "krun"
"""Of the usual metrics of a process, whose plain names are the app's to use."""


@dataclass(slots=True)
class TargetCounts:
    """Of tunnels to one target that are over."""

    closed_by_flag: Counter[Flag] = field(default_factory=Counter)
    sent_bytes: int = 0
    received_bytes: int = 0


class KrunMetrics:
    """The counts of one krun."""

    def __init__(self) -> None:
        self.requests: Requests | None = None
        """The tunnels and requests to the app, once there can be any; likewise `memory`."""
        self.memory: Memory | None = None
        self.mtls_end: MtlsEnd | None = None
        self.egress: Egress | None = None
        """The app's own tunnels, if krun carries any."""
        self.connections: Callable[[], int] = lambda: 0
        """How many HTTP/2 connections are open."""
        self.most_connections = 0
        self.dropped_lines: Callable[[], int] = lambda: 0
        """Of the access log."""
        self.start_s: dict[str, float] = {}
        """What each step of the start took, in seconds."""
        self.scrape_failures: Counter[str] = Counter({"envoy": 0, "app": 0})
        self._targets: dict[str, TargetCounts] = {}
        self._refused: Counter[Flag] = Counter()
        self._further: list[Callable[[], Iterator[Metric]]] = []
        self._registry: CollectorRegistry | None = None

    def over(self, record: TunnelRecord) -> None:
        """A tunnel has ended, or was refused."""
        if not record.opened:
            self._refused[record.flag] += 1
            return
        counts = self._targets.setdefault(_label(record), TargetCounts())
        counts.closed_by_flag[record.flag] += 1
        counts.sent_bytes += record.sent_bytes or 0
        counts.received_bytes += record.received_bytes or 0

    def add(self, collect: Callable[[], Iterator[Metric]]) -> None:
        """Adds the metrics that `collect` makes at every scrape."""
        self._further.append(collect)

    @property
    def tunnels(self) -> Iterator[ServedTunnel | RemoteConnection | EgressTunnel | PlainExchange]:
        """Those that are not over, those of inner HBONE, and those that the app has opened."""
        if self.requests is not None:
            yield from self.requests.tunnels
        if self.mtls_end is not None and self.mtls_end.inner is not None:
            yield from self.mtls_end.inner.tunnels
        if self.egress is not None:
            yield from self.egress.tunnels

    def render(self) -> bytes:
        """A scrape, in Prometheus' text format."""
        from prometheus_client import CollectorRegistry, ProcessCollector

        from shared.ops.metrics import Scrape, render

        if self._registry is None:
            self._registry = CollectorRegistry()
            ProcessCollector(namespace=PREFIX, registry=self._registry)
            self._registry.register(Scrape(self._families))
        return render(self._registry, "")[1]

    def _families(self) -> Iterator[Metric]:
        yield from self._tunnel_families()
        yield families.CONNECTIONS_REFUSED.metric(self._refused.items())
        yield families.CONNECTIONS_OPEN.value(self.connections())
        yield families.CONNECTIONS_LIMIT.value(self.most_connections)
        yield families.ACCESS_LOG_DROPPED.value(self.dropped_lines())
        yield families.START_SECONDS.metric(self.start_s.items())
        yield families.SCRAPE_FAILURES.metric(self.scrape_failures.items())
        if self.memory is not None:
            yield families.BUFFERED_BYTES.value(self.memory.held_bytes)
            yield families.BUFFERED_BYTES_LIMIT.value(self.memory.most_bytes)
        if self.requests is not None:
            app = self.requests.app
            yield families.APP_REQUESTS_OPEN.value(app.open_requests)
            yield families.APP_REQUESTS_LIMIT.value(app.most_requests)
            yield families.APP_REQUESTS_FAILED.metric(app.failures.items())
        if self.mtls_end is not None:
            yield families.MTLS_END_CONNECTIONS.value(self.mtls_end.connections)
            yield families.MTLS_END_RESTARTS.value(self.mtls_end.restarts)
            inner = self.mtls_end.inner
            yield families.INNER_CONNECTIONS.value(0 if inner is None else inner.connections)
            yield families.INNER_CONNECTIONS_LIMIT.value(self.mtls_end.most_inner)
            yield families.POLICIES_UNENFORCED.value(len(self.mtls_end.unenforced_policies))
        for collect in self._further:
            yield from collect()

    def _tunnel_families(self) -> Iterator[Metric]:
        """Those that are over, and those that are open with what they have carried so far."""
        counts = {name: (c.sent_bytes, c.received_bytes) for name, c in self._targets.items()}
        opened: Counter[str] = Counter()
        for tunnel in self.tunnels:
            name, relay = _label(tunnel.record), tunnel.relay
            if relay is not None:
                opened[name] += 1
                sent, received = counts.get(name, (0, 0))
                counts[name] = sent + relay.sent_bytes, received + relay.received_bytes
        closed = {name: c.closed_by_flag.total() for name, c in self._targets.items()}
        yield families.TUNNELS_OPENED.metric((name, opened[name] + closed.get(name, 0)) for name in counts)
        yield families.TUNNELS_CLOSED.metric(
            (name, flag, n) for name, c in self._targets.items() for flag, n in c.closed_by_flag.items()
        )
        yield families.TUNNELS_OPEN.metric((name, opened[name]) for name in counts)
        yield families.SENT_BYTES.metric((name, sent) for name, (sent, _) in counts.items())
        yield families.RECEIVED_BYTES.metric((name, received) for name, (_, received) in counts.items())


def _label(record: TunnelRecord) -> str:
    """Of a tunnel that was open: its target, of which krun has a few; for inner HBONE, and for what the app
    opens, how it was asked for, as what it asks for may be anything."""
    return record.route or record.name or ""

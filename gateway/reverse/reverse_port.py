"""The reverse port: workloads that cannot be dialled dial us and register names; tunnels go back to them.

When we are going to end we say GOAWAY at once and go on opening streams: the workload looks for our successor
while it still serves us (RFC 9113 section 6.8 lets the sender of GOAWAY open streams).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gateway.config.limit_settings import Limits
from gateway.config.reverse_settings import ReverseSettings
from gateway.ports.admission import Refusals
from gateway.ports.listeners import Key, Listeners
from gateway.ports.mesh_connections import MeshConnections
from gateway.reverse.registrations import ROUTE, Registrations
from gateway.reverse.registry import Registration, Registry
from gateway.reverse.workload_upstream import WorkloadUpstream
from shared.address import Address
from shared.http2.events import Headers
from shared.net.tls.revocation_watch import RevocationWatch
from shared.ops import families
from shared.ops.access_log import AccessLog
from shared.ops.metrics import TunnelMetrics
from shared.tunnel.tunnel_record import TunnelRecord

if TYPE_CHECKING:
    from prometheus_client import Metric

CLOSE_S = 1.0
"""Seconds for workloads to read our last bytes when we end."""


class ReverseListener:
    """The port, its connections and the names that they have."""

    def __init__(
        self,
        settings: ReverseSettings,
        access_log: AccessLog,
        metrics: TunnelMetrics,
        *,
        limits: Limits,
        refusals: Refusals | None = None,
        is_full: Callable[[], bool] = lambda: False,
        siblings: int = 1,
        ports: Mapping[Key, Address] | None = None,
        share: Callable[[int], int] = lambda total: total,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`siblings` processes listen together, this one included, in place of port 0 on `ports`, and of
        their limits it has its `share`. The drain timeout of `limits` is for the tunnels of a workload whose
        certificate has ended, by `wall_clock`."""
        self._settings = settings
        self._metrics = metrics
        self._registry = Registry(share(settings.max_names), share(settings.max_connections_per_name))
        self._registrations = Registrations(
            settings, self._registry, access_log, metrics, siblings, refusals or Refusals()
        )
        self._connections = MeshConnections(
            settings,
            share=share,
            is_full=is_full,
            make=self._registrations.make,
            refused=self._registrations.refused,
            changed=lambda: None,
            admitted=self._registrations.admitted,
            prepare=self._registrations.prepare,
            expired=self._registrations.let_go,
            expel=self._registrations.expel,
            drain_timeout_s=limits.drain_timeout_s,
            purpose="reverse",
            wall_clock=wall_clock,
        )
        self._listeners = Listeners(
            self._connections.protocol, siblings=siblings, ports=ports, purpose="reverse"
        )
        self._watch(metrics)

    def _watch(self, metrics: TunnelMetrics) -> None:
        registry = self._registry
        for gauge, read in (
            (families.REVERSE_CONNECTIONS, lambda: len(self._connections)),
            (families.REVERSE_CONNECTIONS_LIMIT, lambda: self._connections.most),
            (families.REVERSE_WORKLOADS, lambda: len(registry)),
            (families.REVERSE_NAMES, lambda: len(registry.names)),
            (families.REVERSE_NAMES_LIMIT, lambda: registry.most_names),
            (families.REVERSE_LARGEST_NAME, lambda: registry.largest),
            (families.REVERSE_LARGEST_NAME_LIMIT, lambda: registry.most_per_name),
        ):
            metrics.watch(gauge, read)
        metrics.add(self._families)

    def _families(self) -> Iterator[Metric]:
        yield families.REVERSE_REGISTRATIONS.value(self._registrations.total)

    # What the owner asks.

    @property
    def revocations(self) -> RevocationWatch | None:
        """The lists that workloads are held against."""
        return self._connections.revocations

    @property
    def addresses(self) -> list[Address]:
        """Where it listens; tells the ports that were 0."""
        return self._listeners.bound

    @property
    def names(self) -> Mapping[str, list[Registration]]:
        """The registrations by their name."""
        return self._registry.names

    def rows(self, now: float) -> list[dict[str, Any]]:
        """The registrations for the admin port's dump; `now` is the loop's clock."""
        return [
            {
                "origin": f"{ROUTE}://{it.name}",
                "src.addr": it.peer,
                "identity": str(it.identity),
                "age_s": round(now - it.since, 3),
                "streams": it.connection.open_streams,
                "room": it.connection.room,
            }
            for registrations in self._registry.names.values()
            for it in registrations
        ]

    def use_limits(self, limits: Limits) -> None:
        """Goes by `limits` for certificates that end from now on."""
        self._connections.drain_timeout_s = limits.drain_timeout_s

    def apply(self, settings: ReverseSettings) -> None:
        """From now on goes by the rules of `settings`, whose other fields are as before; they hold for
        workloads that are registered already, too."""
        self._registrations.apply(settings)

    # Start and end.

    async def start(self) -> None:
        """Reads the certificates and listens.

        Raises:
            UnavailableError: a file is missing, or an address cannot be had.
            ConfigError: a file has not what it should.
        """
        self._connections.read_certificates()
        await self._listeners.open(self._settings.listen)

    async def leave(self) -> None:
        """Accepts no new connection, and has the workloads connect to our successor."""
        self._registrations.leave()
        await self._listeners.close()

    async def close(self, text: str = "the gateway stops") -> None:
        """Ends all connections, in order where nothing is open on them; `text` says why of the others."""
        self._registrations.leave()
        self._listeners.abort()
        self._connections.drain()
        if len(self._registrations):
            self._registrations.over.clear()
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._registrations.over.wait()
            except TimeoutError:
                pass
        await self._connections.close(text)

    # A tunnel.

    def upstream(self, name: str, headers: Headers, record: TunnelRecord) -> WorkloadUpstream:
        """The workloads with the name `name`, to be asked with `headers` for the tunnel of `record`."""
        wait_s = self._settings.wait_s
        return WorkloadUpstream(self._registry, name, headers, record, self._metrics, wait_s=wait_s)

"""The app's way into the mesh without root, Envoy or istiod: local ports and a proxy, and the gateway behind
them.

Each connection becomes a CONNECT on a pooled HTTP/2 connection with mTLS to the gateway's HBONE port, with
the workload's certificate. The gateway looks names up, judges by its own rules, and connects the target.
Nothing here asks DNS for a target; krun looks up the gateway's own name only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from agent.config.egress_settings import EgressSettings, GatewayUrl, LocalTarget
from agent.config.own_baggage import own_baggage, own_namespace
from agent.config.own_identity import own_trust_domain
from agent.config.settings import Settings
from agent.egress.egress_proxy import EgressProxy
from agent.egress.egress_tunnel import LOCAL, EgressTunnel, EgressTunnels
from agent.egress.plain_requests import PlainExchange
from shared.address import Address
from shared.errors import LimitError, StoppedError
from shared.listen import bound_address, listen
from shared.net.dial import Origin
from shared.net.legs.accepted import AcceptedLeg
from shared.net.legs.tcp import Surplus
from shared.net.names import names
from shared.net.names.endpoint import Resolve
from shared.net.pool.pool import Pool
from shared.net.relay.memory_budget import Holder
from shared.net.relay.tunnel_clock import TunnelClock
from shared.net.tls.mesh_tls import MeshIdentity, client_context
from shared.ops import families
from shared.ops.pool_counts import OriginCounts
from shared.ops.repeated_log import RepeatedLog
from shared.trust.peer_policy import PeerPolicy
from shared.tunnel.tunnel_record import TunnelRecord

if TYPE_CHECKING:
    from prometheus_client import Metric

    from agent.egress.front_end import FrontEnd
    from shared.net.http2.connection import Connection

log = logging.getLogger("hbone.egress")

CLOSE_S = 1.0
"""For the last bytes to the gateway."""

LIMIT = "HBONE_EGRESS_MAX_CONNECTIONS"


class Egress:
    """Made by the agent; nothing is open before `start`."""

    def __init__(
        self,
        settings: Settings,
        egress: EgressSettings,
        *,
        most: int | None = None,
        refusal: Callable[[], LimitError | None] = lambda: None,
        over: Callable[[TunnelRecord], None],
        resolve: Resolve = names.resolve,
    ) -> None:
        """`most` connections may be open; None: as `egress` says. `refusal()` says why no tunnel is opened
        now, if so; `over(record)` is told of each that has ended. `resolve` is asked for the gateway's name
        only.

        Raises UnavailableError, ConfigError or DeniedError if the certificates, or the lists, are none.
        """
        assert egress.gateway is not None
        self._settings = egress
        self._peers = egress.peers or own_trust_domain(settings.certificates)
        trust = settings.trust(self._peers)
        identity = MeshIdentity(settings.certificates, self._peers, crl=settings.crl, trust=trust)
        client_context(identity, asyncio.get_running_loop().time())
        PeerPolicy(self._peers, trust=trust)
        self._counts = OriginCounts()
        self._front_end: FrontEnd | None = None
        if isinstance(egress.gateway, GatewayUrl):
            from agent.egress.front_end import FrontEnd

            self._front_end = FrontEnd(egress.gateway, egress, retire=self._retire, resolve=resolve)
            address = egress.gateway.address
            self._pool = Pool(counts=lambda _: self._counts, resolve=resolve, dial=self._front_end.dial)
        else:
            address = egress.gateway
            self._pool = Pool(counts=lambda _: self._counts, resolve=resolve)
        self._origin = Origin("https", address.host, address, identity=identity, searched=True)
        self._clock = TunnelClock(settings.idle_timeout_s)
        self._tunnels = EgressTunnels(
            egress,
            self._origin,
            self._pool,
            self._clock,
            baggage=own_baggage(settings, own_namespace(settings)),
            half_closed_timeout_s=settings.half_closed_timeout_s,
            refusal=refusal,
            over=self._over,
        )
        self._told_over = over
        self._proxy = EgressProxy(self._tunnels)
        self._most = egress.max_connections if most is None else most
        self._legs: set[AcceptedLeg] = set()
        self._surplus = 0
        self._servers: list[asyncio.Server] = []
        self.ports: list[LocalTarget] = []
        """The local ports, where they really listen."""
        self.proxy: Address | None = None
        """Where the proxy listens; None: there is none."""
        self._warnings = RepeatedLog(log)
        self._ended = asyncio.Event()

    async def start(self) -> None:
        """Listens. Raises UnavailableError."""
        for local in self._settings.local:
            bound = await self._listen(local.listen, partial(self._accepted_local, local.target))
            self.ports.append(LocalTarget(bound, local.target))
            log.info("egress: %s leads to %s, by %s", bound, local.target, self._settings.gateway)
        if self._settings.has_proxy:
            assert self._settings.proxy is not None
            self.proxy = await self._listen(self._settings.proxy, self._proxy.accepted)
            allowed = ", ".join(map(str, self._settings.allow))
            log.info(
                "egress: HTTP and SOCKS proxy on %s, by %s, to %s",
                self.proxy,
                self._settings.gateway,
                allowed,
            )
        log.info("egress: the gateway has to be %s", ", ".join(self._peers))

    async def emptied(self) -> None:
        """Returns when there is no tunnel. Connections that wait for a request do not count."""
        while self.tunnels:
            self._ended.clear()
            await self._ended.wait()

    async def close(self) -> None:
        """Ends it with all connections."""
        for server in self._servers:
            server.close()
        self._proxy.close()
        for tunnel in list(self._tunnels.open):
            tunnel.abort(StoppedError("krun stops"))
        await self._pool.close(CLOSE_S)
        if self._front_end is not None:
            await self._front_end.close(CLOSE_S)
        self._clock.close()
        self._warnings.close()

    # Connections.

    async def _listen(self, address: Address, accepted: Callable[[AcceptedLeg], None]) -> Address:
        server = await listen(address, partial(self._accept, accepted), purpose="egress")
        self._servers.append(server)
        return Address(address.host, bound_address(server).port)

    def _accept(self, accepted: Callable[[AcceptedLeg], None]) -> asyncio.BaseProtocol:
        if len(self._legs) >= self._most:
            return Surplus(self._turned_away)
        return AcceptedLeg(partial(self._accepted, accepted))

    def _accepted(self, accepted: Callable[[AcceptedLeg], None], leg: AcceptedLeg) -> None:
        self._legs.add(leg)
        leg.on_lost = partial(self._lost, leg)
        accepted(leg)

    def _accepted_local(self, target: Address, leg: AcceptedLeg) -> None:
        EgressTunnel(self._tunnels, leg, target, LOCAL, refused=lambda _: leg.abort()).begin()

    def _lost(self, leg: AcceptedLeg) -> None:
        self._legs.discard(leg)
        self._proxy.left(leg)
        tunnel = self._tunnels.of_legs.get(leg)
        if tunnel is not None:
            tunnel.client_gone()

    def _turned_away(self, peer: str) -> None:
        self._surplus += 1
        error = LimitError(f"{self._most} connections are open, which is {LIMIT}", LIMIT)
        self._warnings.warning("surplus", f"egress: {peer} turned away: {error}")

    def _over(self, record: TunnelRecord) -> None:
        if not record.opened and record.error is not None:
            self._warnings.warning(
                record.flag, f"egress: no tunnel to {record.name or 'anything'}: {record.error}"
            )
        self._told_over(record)
        self._ended.set()

    def _retire(self, connection: Connection) -> None:
        pool = self._pool.origins.get(self._origin)
        if pool is not None:
            pool.retire(connection)

    # What is known of it.

    @property
    def open_connections(self) -> int:
        """Those of the app."""
        return len(self._legs)

    @property
    def tunnels(self) -> Collection[EgressTunnel | PlainExchange]:
        """Those that are being opened included."""
        return [*self._tunnels.open, *self._proxy.requests.open]

    @property
    def connections(self) -> Collection[Connection]:
        """Those to the gateway, and to the front end that carries them."""
        pools = [self._pool] if self._front_end is None else [self._pool, self._front_end.pool]
        return [
            one.connection
            for pool in pools
            for of_origin in pool.origins.values()
            for one in (*of_origin.members, *of_origin.draining)
        ]

    def holders(self) -> Iterator[Holder]:
        """Whatever holds bytes for a tunnel."""
        return iter(self.tunnels)

    @property
    def shared_bytes(self) -> int:
        """What waits on connections to the gateway, for no tunnel in particular."""
        carriers = 0 if self._front_end is None else self._front_end.pool.buffered_bytes
        return self._pool.buffered_bytes + carriers

    def shown(self) -> dict[str, Any]:
        """For the admin port."""
        egress, front_end = self._settings, self._front_end
        return {
            "gateway": {
                "address": str(egress.gateway),
                "peers": list(self._peers),
                **_shown(self._pool, self._origin, self._counts),
            },
            "front_end": None
            if front_end is None
            else {
                "address": str(front_end.origin.address),
                **_shown(front_end.pool, front_end.origin, front_end.counts),
            },
            "ports": [{"listen": str(one.listen), "target": str(one.target)} for one in self.ports],
            "proxy": None if self.proxy is None else str(self.proxy),
            "allow": list(map(str, egress.allow)),
            "deny": list(map(str, egress.deny)),
            "open": len(self._legs),
            "most": self._most,
        }

    def families(self) -> Iterator[Metric]:
        """What is not counted with krun's other tunnels."""
        counted = [(str(self._settings.gateway), self._counts)]
        if (front_end := self._front_end) is not None:
            counted.append((f"{front_end.origin.scheme}://{front_end.origin.address}", front_end.counts))
        yield families.EGRESS_CONNECTIONS.value(len(self._legs))
        yield families.EGRESS_CONNECTIONS_LIMIT.value(self._most)
        yield families.LIMIT_REFUSALS.metric([(LIMIT, self._surplus)])
        yield families.RETRIES.metric((*key, n) for key, n in self._tunnels.retries.items())
        yield families.UPSTREAM_CONNECTIONS.metric((origin, one.open) for origin, one in counted)
        yield families.UPSTREAM_CONNECTIONS_OPENED.metric(
            (origin, one.opened_total) for origin, one in counted
        )
        yield families.UPSTREAM_CONNECTIONS_CLOSED.metric(
            (origin, reason, n) for origin, one in counted for reason, n in one.closed_by_reason.items()
        )
        yield families.UPSTREAM_CONNECTIONS_DRAINING.metric((origin, one.draining) for origin, one in counted)
        yield families.UPSTREAM_DIALS_FAILED.metric(
            (origin, one.dials_failed_total) for origin, one in counted
        )
        yield families.UPSTREAM_WAITING.metric((origin, one.waiting) for origin, one in counted)
        yield families.UPSTREAM_WAITING_REFUSED.metric((origin, one.refused_total) for origin, one in counted)


def _shown(pool: Pool, origin: Origin, counts: OriginCounts) -> dict[str, Any]:
    """The connections to one origin, for the admin port."""
    of_origin = pool.origins.get(origin)
    failing = pool.failing.get(origin) if of_origin is None else of_origin.backoff
    return {
        "connections": counts.open,
        "waiting": counts.waiting,
        "dials_failed": counts.dials_failed_total,
        "last_failure": "" if failing is None else failing.reason,
    }

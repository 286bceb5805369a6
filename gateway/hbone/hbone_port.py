"""The HBONE port: members of the mesh open tunnels with CONNECT, over HTTP/2 over mTLS, as ztunnel does.

1. The rules of a reload hold for new tunnels; open ones stay.
2. A peer whose certificate has ended opens no tunnel: its requests are refused unprocessed (REFUSED_STREAM),
   so that it can ask again with a newer certificate. Its open tunnels have the drain timeout.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

from gateway.config.hbone_settings import HboneSettings
from gateway.config.limit_settings import Limits
from gateway.hbone.hbone_tunnel import ROUTE, HboneTunnel, HboneTunnels
from gateway.hbone.post_port import PostPort
from gateway.ports.admission import Refusals, report_refusal
from gateway.ports.listeners import Key, Listeners
from gateway.ports.member_connection import MemberConnection
from gateway.ports.mesh_connections import MeshConnections
from gateway.rules.templates import shown
from gateway.sni.tunnel import Tunnels
from shared.address import Address
from shared.errors import DeniedError, HboneError, StreamResetError
from shared.http2.frames import CANCEL
from shared.net.legs.stream import Stream, header_value
from shared.net.tls.revocation_watch import Counted, RevocationWatch
from shared.ops import families
from shared.ops.access_log import AccessLog
from shared.ops.metrics import TunnelMetrics
from shared.tunnel.tunnel_record import TunnelRecord


class HboneListener:
    """The port, its connections and their tunnels."""

    def __init__(
        self,
        settings: HboneSettings,
        access_log: AccessLog,
        metrics: TunnelMetrics,
        *,
        limits: Limits,
        changed: Callable[[], None] = lambda: None,
        refusals: Refusals | None = None,
        is_full: Callable[[], bool] = lambda: False,
        siblings: int = 1,
        ports: Mapping[Key, Address] | None = None,
        post_ports: Mapping[Key, Address] | None = None,
        share: Callable[[int], int] = lambda total: total,
        wall_clock: Callable[[], float] = time.time,
        by_route: Tunnels | None = None,
        name_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        """Of `limits` the time to connect is a target's, for the look-up of its name and TCP, and the drain
        timeout is for the tunnels of a peer whose certificate has ended, by `wall_clock`. `changed` is called
        when `unfinished` may have changed; `refusals` counts who came up against a limit, of which `is_full`
        is one: no memory for buffers. `siblings` processes listen together, this one included, in place of
        port 0 on `ports` and, for POSTs, `post_ports`; of their limits it has its `share`. `by_route` has the
        routes that take tunnels of this port, and what opens them; `name_of` tells the Service's name of an
        address."""
        self._settings = settings
        refusals = refusals or Refusals()
        self._report = partial(report_refusal, access_log=access_log, metrics=metrics, refusals=refusals)
        self.tunnels = HboneTunnels(
            settings,
            access_log,
            metrics,
            limits=limits,
            refusals=refusals,
            is_full=is_full,
            share=share,
            by_route=by_route,
            name_of=name_of,
            over=changed,
            own_name=lambda: self._connections.own_name,
        )
        self._connections = MeshConnections(
            settings,
            share=share,
            is_full=is_full,
            make=lambda lost: MemberConnection(client=False, on_request=self._serve, on_lost=lost),
            refused=self._refused,
            changed=changed,
            expel=self._expel,
            drain_timeout_s=limits.drain_timeout_s,
            wall_clock=wall_clock,
        )
        self._listeners = Listeners(
            self._connections.protocol, siblings=siblings, ports=ports, purpose="hbone"
        )
        self._posts = PostPort(
            self._connections, report=self._report, changed=changed, siblings=siblings, bound=post_ports
        )
        for gauge, read in (
            (families.LISTENER_CONNECTIONS, lambda: self.open_connections),
            (families.LISTENER_CONNECTIONS_LIMIT, lambda: self._connections.most),
            (families.LISTENER_FRONT_CONNECTIONS, lambda: len(self._posts)),
            (families.LISTENER_TUNNELS, lambda: self.open_tunnels),
            (families.LISTENER_TUNNELS_LIMIT, lambda: self.tunnels.most),
        ):
            metrics.watch(gauge, read)
        metrics.add(self.tunnels.tokens.families)

    # What the owner asks.

    @property
    def revocations(self) -> RevocationWatch | None:
        """The lists that peers are held against."""
        return self._connections.revocations

    @property
    def inner_revocations(self) -> Iterable[Counted]:
        """The lists that services are held against to which we speak TLS inside of their tunnels."""
        return self.tunnels.inner_revocations()

    @property
    def open_connections(self) -> int:
        """Connections that are open now, handshakes included."""
        return len(self._connections)

    @property
    def unfinished(self) -> int:
        """What a drain waits for: open connections, or else tunnels whose connection has gone."""
        return len(self._connections) + len(self._posts) or sum(
            tunnel.outlives_its_connection for tunnel in self.tunnels.open
        )

    @property
    def open_tunnels(self) -> int:
        """Tunnels that are open or being connected."""
        return len(self.tunnels.open)

    @property
    def buffered_bytes(self) -> int:
        """What waits on its connections to be sent; tunnels are asked themselves."""
        return self._connections.buffered_bytes + self._posts.buffered_bytes

    @property
    def addresses(self) -> list[Address]:
        """Where it listens; tells the ports that were 0."""
        return self._listeners.bound

    @property
    def post_addresses(self) -> list[Address]:
        """The same for POSTs."""
        return self._posts.addresses

    def count_bytes(self) -> None:
        """Brings the byte counters up to date with the tunnels that are still open."""
        for tunnel in self.tunnels.open:
            tunnel.count_bytes()

    def rows(self) -> list[dict[str, Any]]:
        """The tunnels for the admin port's dump."""
        return [tunnel.row() for tunnel in self.tunnels.open]

    # Start and end.

    def use_limits(self, limits: Limits) -> None:
        """Goes by `limits` for tunnels that open, and certificates that end, from now on."""
        self.tunnels.use_limits(limits)
        self._connections.drain_timeout_s = limits.drain_timeout_s

    def apply(self, settings: HboneSettings) -> None:
        """From now on goes by the rules and limits of `settings`, whose other fields are as before."""
        self.tunnels.apply(settings)
        self._settings = self._connections.settings = settings

    async def start(self) -> None:
        """Reads the certificates and listens.

        Raises:
            UnavailableError: a file is missing, or an address cannot be had.
            ConfigError: a file has not what it should.
        """
        self._connections.read_certificates()
        self.tunnels.tokens.start()
        await self._listeners.open(self._settings.listen)
        await self._posts.open(self._settings.tunnel_listen)

    async def drain(self) -> None:
        """Accepts no new connections and tunnels; each connection closes when its last tunnel is over."""
        await asyncio.gather(self._listeners.close(), self._posts.drain())
        self._connections.drain()

    async def close(self, error: HboneError | None = None) -> None:
        """Ends everything at once; `error` says why in the tunnels' log lines."""
        error = error or StreamResetError("the gateway stops", CANCEL)
        self._listeners.abort()
        tasks = [tunnel.stop(error) for tunnel in list(self.tunnels.open)]
        self.tunnels.close()
        await self._connections.close(str(error))
        self._posts.close(str(error))
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)

    # Its connections.

    def _serve(self, stream: Stream) -> None:
        member = cast("MemberConnection", stream.connection)
        if member.identity is None:  # it has been told GOAWAY
            stream.abort()
            return
        authority = header_value(stream.headers, b":authority")
        record = TunnelRecord(
            peer=member.peer_name,
            route=ROUTE,
            identity=str(member.identity),
            name=shown(authority.decode("latin-1")),
            stream=stream.id,
        )
        if member.expiry is None or member.expiry.allows_stream():
            HboneTunnel(self.tunnels, stream, record, member.identity).begin(authority)
            return
        # It may have a newer certificate by now, and ask again on a connection with that.
        error = member.expiry.error
        assert error is not None
        stream.refuse()
        self._report(record, error)

    def _expel(self, member: MemberConnection, error: DeniedError) -> None:
        """Ends a connection whose peer is not let in any more, with its tunnels."""
        for tunnel in list(self.tunnels.open):
            if tunnel.stream.connection is member:
                tunnel.stop(error)
        member.expel(error)

    def _refused(self, peer: str, duration_s: float, error: HboneError) -> None:
        """A connection came to nothing."""
        self._report(TunnelRecord(peer=peer, route=ROUTE), error, duration_s)

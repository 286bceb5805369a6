"""The HBONE port behind a front end: a POST of `/_hbone/15008` in HTTP/2 without TLS carries the connection
of a member of the mesh, which is one of the HBONE port's like those that come by TCP.

1. Nothing that a request says counts, and nobody is known by the front end's connection: who the member is
   comes out of its own TLS, as on the HBONE port, with the same deadline and bounds.
2. A POST has its place among the HBONE port's connections from its first moment on. Connections of front ends
   have a bound of the same size; one without a POST is closed after `IDLE_S`.
3. 404 for another path, 405 for another method, 503 where there is no room and in a drain. A front end that
   speaks HTTP/1.1 is told what to declare.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus

from gateway.hbone.hbone_tunnel import ROUTE
from gateway.ports.admission import HBONE_CONNECTIONS
from gateway.ports.listeners import Key, Listeners
from gateway.ports.mesh_connections import MeshConnections
from shared import ports
from shared.address import Address
from shared.errors import HboneError, LimitError, NoRouteError, RefusedError
from shared.http2.flood_guard import FloodLimits
from shared.http2.session import SessionLimits
from shared.net.http2.connection import Connection
from shared.net.http2.first_bytes import FirstBytes, http1_answer
from shared.net.legs.stream import Stream, header_value
from shared.net.legs.tcp import Surplus
from shared.ops.repeated_log import RepeatedLog
from shared.tunnel.tunnel_record import TunnelRecord
from shared.tunnel.tunnel_request import target_name
from shared.tunnel.tunnel_server import ServedTunnel

log = logging.getLogger("hbone.gateway")

TARGET = str(ports.HBONE)

H2C_ONLY = (
    "it accepts HTTP/2 without TLS (h2c) only: have the front end speak that to it, in Kubernetes by "
    "appProtocol: kubernetes.io/h2c at the Service's port"
)

_HTTP1_ANSWER = http1_answer(f"hgate, the port of members that come by POST: {H2C_ONLY}.")

LIMITS = SessionLimits(floods=FloodLimits(front_end=True))
"""A front end carries the connections of many members on one of its own."""

IDLE_S = 300.0
"""Front ends keep connections for requests to come; GOAWAY costs them nothing."""

Report = Callable[[TunnelRecord, HboneError, float | None], None]


class PostPort:
    """The port, if there is one, its connections and their tunnels."""

    def __init__(
        self,
        members: MeshConnections,
        *,
        report: Report,
        changed: Callable[[], None],
        siblings: int = 1,
        bound: Mapping[Key, Address] | None = None,
    ) -> None:
        """`members` are the HBONE port's connections. `report` is told of each POST that is refused, and why;
        `changed` is called when `len` has changed. `siblings` processes listen together, this one included,
        in place of port 0 on `bound`."""
        self._members = members
        self._report = report
        self._changed = changed
        self._arriving: set[FirstBytes] = set()  # connections that have not said what they speak
        self._connections: set[Connection] = set()
        self._draining = False
        self._warnings = RepeatedLog(log)
        self._listeners = Listeners(self._accept, siblings=siblings, ports=bound, purpose="hbone tunnels")

    def __len__(self) -> int:
        """How many connections of front ends are open."""
        return len(self._connections) + len(self._arriving)

    @property
    def addresses(self) -> list[Address]:
        """Where it listens; tells the ports that were 0."""
        return self._listeners.bound

    @property
    def buffered_bytes(self) -> int:
        """What waits on its connections to be sent, beside what their tunnels hold."""
        return sum(connection.buffered_bytes for connection in self._connections)

    async def open(self, addresses: tuple[Address, ...]) -> None:
        """Listens. Raises UnavailableError."""
        await self._listeners.open(addresses)

    async def drain(self) -> None:
        """Accepts no new connections and POSTs; each connection closes when its last tunnel is over."""
        await self._listeners.close()
        self._draining = True
        for arriving in list(self._arriving):
            arriving.serve()
        for connection in list(self._connections):
            connection.drain()

    def close(self, text: str) -> None:
        """Drops everything at once; `text` says why."""
        self._listeners.abort()
        self._warnings.close()
        for arriving in list(self._arriving):
            arriving.abort()
        for connection in list(self._connections):
            connection.abort(text)

    # Connections.

    def _accept(self) -> asyncio.BaseProtocol:
        if self._draining:  # it waited to be accepted
            connection = self._connection()
            connection.drain()
            return connection
        most = self._members.most
        if len(self) >= most:
            text = f"{most} connections of front ends are open, which is max_connections"
            return Surplus(partial(self._turned_away, LimitError(text, HBONE_CONNECTIONS)))
        arriving = FirstBytes(
            connection=self._connection,
            answer=_HTTP1_ANSWER,
            http1=self._http1,
            decided=self._decided,
        )
        self._arriving.add(arriving)
        return arriving

    def _connection(self) -> Connection:
        connection = Connection(
            client=False, limits=LIMITS, on_request=self._serve, on_lost=self._lost, idle_timeout_s=IDLE_S
        )
        self._connections.add(connection)
        return connection

    def _decided(self, arriving: FirstBytes) -> None:
        self._arriving.discard(arriving)
        self._changed()

    def _http1(self, peer: str) -> None:
        self._warnings.warning("http1", f"HTTP/1.1 from {peer} on hbone.tunnel_listen: {H2C_ONLY}")

    def _turned_away(self, error: LimitError, peer: str) -> None:
        self._report(TunnelRecord(peer=peer, route=ROUTE), error, None)

    def _lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._changed()

    # One POST.

    def _serve(self, stream: Stream) -> None:
        record = TunnelRecord(peer=stream.connection.peer_name, route=ROUTE, stream=stream.id)
        tunnel = ServedTunnel(stream, record, self._over)
        if target_name(header_value(stream.headers, b":path")) != TARGET:
            text = f"no such tunnel: members of the mesh come by POST to /_hbone/{TARGET}"
            tunnel.refuse(HTTPStatus.NOT_FOUND, NoRouteError(text))
        elif header_value(stream.headers, b":method") != b"POST":
            error = RefusedError("a tunnel is opened with POST")
            tunnel.refuse(HTTPStatus.METHOD_NOT_ALLOWED, error, [(b"allow", b"POST")])
        elif self._draining:
            tunnel.refuse(HTTPStatus.SERVICE_UNAVAILABLE, RefusedError("the gateway is ending"))
        else:
            try:
                leg = self._members.carried(stream)
            except LimitError as error:
                tunnel.refuse(HTTPStatus.SERVICE_UNAVAILABLE, error)
            else:
                tunnel.open(leg)

    def _over(self, tunnel: ServedTunnel) -> None:
        """What was opened is told of by the member's own tunnels, or its refusal."""
        error = tunnel.record.error
        if error is not None and not tunnel.record.opened:
            self._report(tunnel.record, error, tunnel.age_s)

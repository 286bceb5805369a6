"""The proxy to Cloud Run services on loopback: what runsd did with `http://SERVICE`, as an HTTP proxy.

A connection speaks HTTP/1.1, or HTTP/2 with prior knowledge (gRPC without TLS); its first bytes tell. Project
and region are asked of the metadata server when they are first needed, so a start waits for nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import cast

from agent.config.settings import Settings
from agent.proxy.http1_server import Http1Server
from agent.services.service_names import ServiceName, project_number_of, region_of
from agent.services.service_requests import ServiceRequests, is_service
from shared.address import Address
from shared.errors import LimitError, UnavailableError
from shared.http2.flood_guard import FloodLimits
from shared.http2.frames import PREFACE_WORD
from shared.http2.session import SessionLimits
from shared.listen import bound_address, listen
from shared.net.http2.connection import PREFACE_TIMEOUT_S, Connection
from shared.net.legs.read_buffer import READ_BUFFER
from shared.net.legs.tcp import Surplus, TcpLeg
from shared.net.legs.tcp_end import FIN_ON_CLOSE, set_end
from shared.ops.repeated_log import RepeatedLog
from shared.tasks import spawn

log = logging.getLogger("hbone.services")

LIMITS = SessionLimits(floods=FloodLimits(front_end=True))
"""An app may carry all that it does on one connection, and give up many requests of it."""

IDLE_S = 60.0
"""How long a connection that speaks HTTP/1.1 may be without a request: as long as with runsd."""

CLOSE_S = 1.0
"""For the last bytes to services."""


class ServiceProxy:
    """Made by the agent; nothing is open before `start`."""

    def __init__(
        self,
        settings: Settings,
        refusal: Callable[[], LimitError | None] = lambda: None,
        requests: ServiceRequests | None = None,
    ) -> None:
        """`refusal()` says why no request is accepted now, if so. `requests` carries them; None: as
        `settings` say."""
        from shared.credentials.token_sources.metadata import MetadataMinter

        self._most = settings.max_connections
        self._idle_timeout_s = settings.connection_idle_timeout_s or None
        self.requests = requests or ServiceRequests(
            OwnPlace(settings.capture.metadata_host, settings.capture.project_number).host,
            MetadataMinter(settings.capture.metadata_host),
            most=settings.max_requests,
            refusal=refusal,
        )
        self._connections: set[Connection | Http1Server | _Arriving] = set()
        self._server: asyncio.Server | None = None
        self._warnings = RepeatedLog(log)

    async def start(self, address: Address) -> Address:
        """Listens; returns where. Raises UnavailableError."""
        self._server = await listen(address, self._accept, purpose="services")
        return bound_address(self._server)

    async def close(self) -> None:
        """Ends it with all connections."""
        if self._server is not None:
            self._server.close()
        await self.requests.close(CLOSE_S)
        for connection in list(self._connections):
            if isinstance(connection, Connection):
                connection.abort("krun stops")
            else:
                connection.close()
        self._warnings.close()

    def _accept(self) -> asyncio.BaseProtocol:
        if len(self._connections) >= self._most:
            text = f"{self._most} connections to services are open, which is HBONE_MAX_CONNECTIONS"
            error = LimitError(text, "HBONE_MAX_CONNECTIONS")
            return Surplus(lambda peer: self._warnings.warning("surplus", f"{peer} turned away: {error}"))
        arriving = _Arriving(self)
        self._connections.add(arriving)
        return arriving

    def arrived(self, arriving: _Arriving, transport: asyncio.Transport | None, early: bytes) -> None:
        """A connection has said what it speaks; without a transport it has gone."""
        self._connections.discard(arriving)
        if transport is None:
            return
        if early.startswith(PREFACE_WORD):
            connection = Connection(
                client=False,
                limits=LIMITS,
                on_request=self.requests.serve,
                on_lost=self._connections.discard,
                idle_timeout_s=self._idle_timeout_s,
            )
            self._connections.add(connection)
            transport.set_protocol(connection)
            connection.connection_made(transport)
            connection.feed(early)
            return
        leg = TcpLeg()
        server = Http1Server(
            leg,
            self.requests.serve,
            serves_ended=True,
            idle_timeout_s=IDLE_S,
            connect=lambda target: partial(self._renewed, leg) if is_service(target) else None,
            gone=self._connections.discard,
        )
        self._connections.add(server)
        transport.set_protocol(leg)
        leg.connection_made(transport)
        leg.join(server)
        server.received(leg, early)

    def _renewed(self, leg: TcpLeg, early: bytes) -> None:
        """A connection begins anew after a CONNECT: so gRPC's C core asks a proxy, and goes on in HTTP/2."""
        transport = leg.release()
        set_end(transport, FIN_ON_CLOSE)
        arriving = _Arriving(self)
        self._connections.add(arriving)
        transport.set_protocol(arriving)
        arriving.connection_made(transport)
        arriving.feed(early)


class _Arriving(asyncio.BufferedProtocol):
    """A connection until its first three bytes are there."""

    def __init__(self, proxy: ServiceProxy) -> None:
        self._proxy: ServiceProxy | None = proxy
        self._early = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Ends it."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass of it
        self._timer = asyncio.get_running_loop().call_later(PREFACE_TIMEOUT_S, made.abort)

    def get_buffer(self, sizehint: int) -> memoryview:
        return READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self.feed(bytes(READ_BUFFER[:nbytes]))

    def feed(self, data: bytes) -> None:
        """Takes what has come."""
        self._early += data
        if len(self._early) >= len(PREFACE_WORD):
            self._over(self._transport)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._over(None)

    def _over(self, transport: asyncio.Transport | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        proxy, self._proxy = self._proxy, None
        if proxy is not None:
            proxy.arrived(self, transport, self._early)


class OwnPlace:
    """Our project's number and our region, as the metadata server at `metadata_host` tells them; each is
    asked once for all who wait, and again after a failure."""

    def __init__(self, metadata_host: str, project_number: str = "") -> None:
        """`project_number` is known if it is not empty."""
        self._metadata_host = metadata_host
        self._known = {"project": project_number} if project_number else {}
        self._asking: dict[str, asyncio.Task[str]] = {}

    async def host(self, name: ServiceName) -> str:
        """The host of a service's URL. Raises UnavailableError, NoRouteError."""
        number = await self._fact("project")
        return name.host(number, "" if name.region else await self._fact("region"))

    async def _fact(self, what: str) -> str:
        known = self._known.get(what)
        if known is not None:
            return known
        task = self._asking.get(what)
        if task is None:
            task = self._asking[what] = spawn(self._ask(what), name=f"metadata server: {what}")
            task.add_done_callback(lambda _: self._asking.pop(what, None))
        return await asyncio.shield(task)

    async def _ask(self, what: str) -> str:
        from agent.mesh.platform import Platform

        platform = Platform(self._metadata_host)
        try:
            if what == "project":
                told = project_number_of(await platform.project_number())
            else:
                told = region_of(await platform.region())
        except ValueError as error:
            raise UnavailableError(f"metadata server at {self._metadata_host}: {error}") from error
        self._known[what] = told
        return told

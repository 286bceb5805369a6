"""hgate as a process in a network of its own, whose name server does as it is told: clients, members of the
mesh, an app and a service that names lead to.

The name server is real (`name_server.py`), and so is /etc/resolv.conf (`network.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from shared.trust.spiffe import SpiffeId
from tests.support import name_server
from tests.support.hbone_port import CALLER, GATEWAY, TRUST_DOMAIN, Mesh
from tests.support.hellos import hello
from tests.support.hgate_process import Hgate, hgate
from tests.support.http2_peer import Http2Peer, Service
from tests.support.name_server import NameServer, late, never
from tests.support.network_namespace import POD
from tests.support.running_gateway import write_config
from tests.support.tcp_peer import PATIENCE_S, TcpPeer

RESOLVER = "127.0.0.53"

LATENCY_S = 0.03
"""Of an honest name's answer."""

POD_RESOLV_CONF = f"""nameserver {RESOLVER}
search hbone-system.svc.cluster.local svc.cluster.local cluster.local
options ndots:5
"""

ATTACKER = "127.0.0.66"

OTHER = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "other")


@asynccontextmanager
async def names() -> AsyncIterator[NameServer]:
    async with name_server.name_server(RESOLVER, 53) as server:
        server.names = {"*.good.test.": (POD,)}
        server.faults = {"*.dead.test.": never, "*": late(LATENCY_S)}
        yield server


class World:
    """hgate with an HBONE port, and an app and a service that its names stand for."""

    def __init__(self, gateway: Hgate, mesh: Mesh, app_port: int, service: Service) -> None:
        self.gateway = gateway
        self.mesh = mesh
        self.app_port = app_port
        self.service = service
        self.hbone_port = 0

    @asynccontextmanager
    async def member(self, identity: SpiffeId = CALLER) -> AsyncIterator[Http2Peer]:
        tls = self.mesh.tls(self.mesh.member(identity))
        async with Http2Peer.connected(self.hbone_port, tls) as peer:
            yield peer

    async def connect(self, name: str, identity: SpiffeId = CALLER) -> tuple[int, str, float]:
        """A CONNECT of a member to the app as `name`: the answer's status and text, and how long it took."""
        loop = asyncio.get_running_loop()
        async with self.member(identity) as peer:
            started = loop.time()
            stream = peer.request(b"CONNECT", b"", authority=f"{name}:{self.app_port}".encode())
            status = await stream.status()
            took_s = loop.time() - started
            text = "" if status == 200 else (await stream.rest()).decode()
            return status, text, took_s

    async def hello(self, service: str) -> float:
        """A client that says hello to `service`, and how long it is until the service is asked for it."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with TcpPeer.connected(self.gateway.port) as client:
            client.send_soon(hello(f"outbound_.8080_._.{service}.demo.svc.cluster.local"))
            stream = await self.service.request()
            took_s = loop.time() - started
            stream.respond(200)
        return took_s

    async def until_metric(self, name: str, least: float, *labels: str) -> None:
        """Returns when a metric has so much."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.gateway.metric(name, *labels) < least:
                pass

    async def until_lines(self, count: int) -> None:
        """Returns when the access log has so many lines."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.gateway.lines) < count:
                await self.gateway.metric("hbone_connections_open")


async def end_after_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The app: ends a connection once something has come, or its end."""
    with suppress(ConnectionError):
        await reader.read(1 << 16)
    writer.close()


@asynccontextmanager
async def world(
    folder: Path, *rules: dict[str, Any], host: str = POD, forward: str = "", **limits: Any
) -> AsyncIterator[World]:
    """hgate with these rules before one that allows all, in front of an app and a service on `host`; names of
    the demo go to the service, and `forward` to the app."""
    mesh = Mesh(folder)
    app = await asyncio.start_server(end_after_first, host, 0)
    app_port = app.sockets[0].getsockname()[1]
    loop = asyncio.get_running_loop()
    service = Service()
    listener = await loop.create_server(service._accept, host, 0)
    service.port = listener.sockets[0].getsockname()[1]
    file = folder / "hgate.yaml"
    everyone = ["spiffe://demo.local/**"]
    routes = [
        *([{"host": forward, "forward": f"{forward}:{app_port}"}] if forward else []),
        {
            "host": "*.demo.svc.cluster.local",
            "tunnel": f"http://{{service}}.good.test:{service.port}/_hbone/15003",
            "token": "none",
        },
    ]
    allowed = [*rules, {"from": everyone, "to": ["*:*", "[::1]:*"]}]
    hbone = {"certificates": str(mesh.member(GATEWAY)), "rules": allowed}
    write_config(file, routes, hbone, **limits)
    async with hgate(file) as gateway:
        made = World(gateway, mesh, app_port, service)
        made.hbone_port = int((await gateway.said(r"^hbone on 127\.0\.0\.1:(\d+)$"))[1])
        try:
            yield made
        finally:
            for peer in service.connections:
                await peer.close()
            listener.close()
            app.close()


class Crowd:
    """Connections that are opened one after the other, and stay open until the block ends."""

    def __init__(self) -> None:
        self._writers: list[asyncio.StreamWriter] = []

    async def say(self, port: int, source: str, first: bytes) -> None:
        """One more, from the address `source`."""
        _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
        writer.write(first)
        self._writers.append(writer)

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)


def sni(service: str) -> bytes:
    return hello(f"outbound_.8080_._.{service}.demo.svc.cluster.local")

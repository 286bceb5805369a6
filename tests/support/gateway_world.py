"""The gateway between all that it talks to: clients, a service, and the metadata server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.hellos import hello
from tests.support.http2_peer import PeerStream, Service
from tests.support.metadata_server import MetadataServer
from tests.support.running_gateway import RunningGateway, running
from tests.support.tcp_peer import TcpPeer
from tests.support.wall_clock import Mint

GLOB = "*.demo.svc.cluster.local"
"""The route's; it takes the name of `hello()`."""


def tunnel(port: int, **fields: Any) -> dict[str, Any]:
    """A route to a service on a loopback port."""
    return {
        "host": GLOB,
        "tunnel": "http://{service}.example/_hbone/15003",
        "connect": f"127.0.0.1:{port}",
        "token": "none",
    } | fields


class World:
    """A gateway, the service behind it, and the metadata server beside it."""

    def __init__(self, service: Service, metadata: MetadataServer, file: Path, block: AsyncExitStack) -> None:
        self.service = service
        self.metadata = metadata
        self.gateway: RunningGateway
        self._file = file
        self._block = block

    async def start(
        self, *routes: dict[str, Any], environ: Mapping[str, str] | None = None, **limits: Any
    ) -> RunningGateway:
        """Starts the gateway; without routes one that takes every name of the demo's."""
        environ = environ or {"GCE_METADATA_HOST": self.metadata.host}
        gateway = running(self._file, routes or (tunnel(self.service.port),), environ=environ, **limits)
        self.gateway = await self._block.enter_async_context(gateway)
        return self.gateway

    async def client(self, first: bytes = b"") -> TcpPeer:
        """A client that has said hello, or `first`."""
        return await self.gateway.client(first or hello())

    async def open(self) -> tuple[TcpPeer, PeerStream]:
        """An open tunnel: its client and the service's stream, from which the hello is taken."""
        said = hello()
        client = await self.client(said)
        stream = await self.service.request()
        stream.respond(200)
        assert await stream.read(len(said)) == said
        return client, stream

    async def echoes(self, client: TcpPeer, stream: PeerStream) -> None:
        """Holds that a tunnel carries bytes both ways."""
        await client.send(b"there")
        assert await stream.read(5) == b"there"
        await stream.send(b"and back")
        assert await client.read(8) == b"and back"

    async def nothing_is_left(self) -> None:
        """Holds that no connection is counted any more."""
        assert await self.gateway.metric("hbone_connections_open") == 0
        assert await self.gateway.dump("/tunnels") == []


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    """A world whose metadata server mints a new token, good for an hour, at each request."""
    mint = Mint(time.time)
    async with Service.listening() as service, MetadataServer(mint) as metadata, AsyncExitStack() as block:
        yield World(service, metadata, folder / "hgate.yaml", block)

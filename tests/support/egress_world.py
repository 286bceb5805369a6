"""krun's way into the mesh in this process: local ports and the proxy, in front of hgate's HBONE port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agent.config.egress_settings import EgressSettings, GatewayUrl, LocalTarget
from agent.config.settings import Settings
from agent.config.target_pattern import TargetPattern
from agent.egress.egress import Egress
from gateway.rules.hbone_rules import Rule
from shared.address import Address
from shared.errors import LimitError
from shared.net.names.endpoint import Endpoint, endpoint
from shared.tunnel.tunnel_record import TunnelRecord
from tests.support.hbone_port import CALLER, GATEWAY, HbonePort, Mesh, serving
from tests.support.process import run
from tests.support.revocation import put, revocation_list, serial_in
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer

ANY = Address("127.0.0.1", 0)

EVERYTHING = ("*:*",)


class EgressWorld:
    """Made by `egress_world`."""

    def __init__(self, egress: Egress, gateway: HbonePort, app: TcpServer) -> None:
        self.egress = egress
        self.gateway = gateway
        self.target = app
        """What the tunnels lead to."""
        self.records: asyncio.Queue[TunnelRecord] = asyncio.Queue()
        self.looked_up: list[str] = []
        """What krun has asked DNS for."""
        self.clients: list[TcpPeer] = []
        """Closed at the end."""
        self.refusal: LimitError | None = None
        """Why nothing is opened now."""

    @property
    def proxy(self) -> int:
        """The proxy's port."""
        assert self.egress.proxy is not None
        return self.egress.proxy.port

    async def record(self) -> TunnelRecord:
        """Of the next tunnel that is over."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.records.get()

    async def curl(self, *options: str) -> tuple[int, str]:
        """curl's exit code and output."""
        code, out, err = await run("curl", "-sS", "-m", "20", *options)
        return code, (out or err).decode()

    async def asked(self, request: bytes) -> TcpPeer:
        """A client of the proxy that has sent `request`."""
        client = await self.client()
        await client.send(request)
        return client

    async def client(self) -> TcpPeer:
        """A client of the proxy."""
        self.clients.append(client := await TcpPeer.connect(self.proxy))
        return client


@asynccontextmanager
async def egress_world(
    folder: Path,
    *rules: Rule,
    allow: tuple[str, ...] = EVERYTHING,
    deny: tuple[str, ...] = (),
    most: int | None = None,
    gateway: Address | GatewayUrl | None = None,
    by_post: bool = False,
    audience: str = "",
    metadata_host: str = "",
    peers: tuple[str, ...] = (str(GATEWAY),),
    local: str | None = None,
    idle_timeout_s: float = 3600.0,
    timeout_s: float = PATIENCE_S,
    gateway_revoked: bool = False,
    mesh: Mesh | None = None,
    **port: Any,
) -> AsyncIterator[EgressWorld]:
    """A local port to `local`, by default the target at localhost, and the proxy; `gateway` stands for
    hgate's port, `rules` and `port` are hgate's; `by_post` leads to its tunnel port, without a front end."""
    mesh = mesh or Mesh(folder)
    if by_post:
        port["tunnel_listen"] = (ANY,)
    async with TcpServer.listening() as app, serving(folder, *rules, mesh=mesh, **port) as hgate:
        world: EgressWorld

        async def resolve(address: Address) -> list[Endpoint]:
            world.looked_up.append(address.host)
            return [endpoint("127.0.0.1", address.port)]

        if by_post:
            posts = Address("gateway.test", hgate.listener.post_addresses[0].port)
            gateway = gateway or GatewayUrl("http", posts, "/_hbone/15008")
        settings = EgressSettings(
            audience=audience,
            metadata_host=metadata_host,
            local=(LocalTarget(ANY, Address.parse(local or f"localhost:{app.port}")),),
            gateway=gateway or Address("gateway.test", hgate.port),
            peers=peers,
            proxy=ANY,
            allow=tuple(map(TargetPattern.parse, allow)),
            deny=tuple(map(TargetPattern.parse, deny)),
            timeout_s=timeout_s,
        )
        crl = None
        if gateway_revoked:
            crl = folder / "crl.pem"
            serial = serial_in(mesh.folder_of(GATEWAY))
            put(crl, revocation_list(mesh.authority, serial))
        egress = Egress(
            Settings(certificates=mesh.member(CALLER), idle_timeout_s=idle_timeout_s, crl=crl),
            settings,
            most=most,
            refusal=lambda: world.refusal,
            over=lambda record: world.records.put_nowait(record),
            resolve=resolve,
        )
        world = EgressWorld(egress, hgate, app)
        await egress.start()
        try:
            yield world
        finally:
            await egress.close()
            for client in world.clients:
                await client.close()
            assert not egress.tunnels

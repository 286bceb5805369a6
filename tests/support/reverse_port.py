"""The reverse port in this process, without the rest of hgate, and workloads that dial it."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.config.limit_settings import Limits
from gateway.config.reverse_settings import ReverseSettings
from gateway.reverse.reverse_port import ReverseListener
from gateway.reverse.workload_upstream import WORKLOAD_RULES
from gateway.rules.reverse_rules import ReverseRule
from shared.address import Address
from shared.net.legs.stream import Stream
from shared.ops.metrics import TunnelMetrics
from shared.tasks import spawn
from shared.trust.spiffe import SpiffeId
from shared.tunnel import registration, tunnel_request
from shared.tunnel.opening import Opening
from shared.tunnel.registration import REGISTERED, Verdict
from shared.tunnel.tunnel_record import TunnelRecord
from tests.support.gateway_output import access_lines, value_of
from tests.support.hbone_port import GATEWAY, TRUST_DOMAIN, Mesh, OwnPort
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.tcp_peer import PATIENCE_S

NAME = "hello.demo.svc.cluster.local"
WORKLOAD = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "hello")

OWN_NAME = ReverseRule(
    (f"spiffe://{TRUST_DOMAIN}/ns/*/sa/*",), ("{service_account}.{namespace}.svc.cluster.local",)
)
"""Everybody may have the name that the certificate says."""


class Workload:
    """A workload that has dialled, played by the h2 library: it serves on the connection that it made."""

    def __init__(self) -> None:
        self.peer: Http2Peer
        self.address = ""
        """Where it has dialled from."""
        self.requests: asyncio.Queue[PeerStream] = asyncio.Queue()

    async def request(self) -> PeerStream:
        """The gateway's next request."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.requests.get()

    async def verdict(self) -> tuple[PeerStream, Verdict]:
        """What the gateway says of the registration, not answered yet."""
        stream = await self.request()
        assert stream[b":path"] == registration.PATH
        return stream, registration.read(stream.fields)

    async def registered(self) -> Verdict:
        """Answers the registration, which has to be a good one."""
        stream, verdict = await self.verdict()
        assert verdict.refusal is None
        stream.respond(REGISTERED, end=True)
        await self.peer.answered()
        return verdict


class ReversePort(OwnPort[ReverseListener]):
    """Made by `serving`."""

    @asynccontextmanager
    async def dialled(
        self, name: str = NAME, identity: SpiffeId = WORKLOAD, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[Workload]:
        """A workload's connection, which has to answer the registration itself."""
        workload = Workload()
        tls = tls or self.mesh.tls(self.mesh.member(identity))
        async with asyncio.timeout(PATIENCE_S):
            _, workload.peer = await asyncio.get_running_loop().create_connection(
                lambda: Http2Peer(client=False, requested=workload.requests.put_nowait),
                "127.0.0.1",
                self.port,
                ssl=tls,
                server_hostname=name,
            )
        workload.address = workload.peer.local_address
        try:
            yield workload
        finally:
            await workload.peer.close()

    @asynccontextmanager
    async def workload(self, name: str = NAME, identity: SpiffeId = WORKLOAD) -> AsyncIterator[Workload]:
        """A workload that is registered, its line in the log read."""
        async with self.dialled(name, identity) as workload:
            await workload.registered()
            line = await self.line()
            assert (line["message"], line["sni"]) == ("workload registered", name)
            yield workload

    def open(self, name: str = NAME, timeout_s: float = PATIENCE_S) -> asyncio.Task[Stream]:
        """A tunnel to whoever has registered `name`."""
        headers = tunnel_request.post("https", name, "/_hbone/15003")
        upstream = self.listener.upstream(name, headers, TunnelRecord(peer="client:1", route=NAME))
        return spawn(Opening(upstream, timeout_s, WORKLOAD_RULES).run(), name="open")

    async def opened(self, workload: Workload) -> tuple[Stream, PeerStream]:
        """An open tunnel to `workload`: our end and its."""
        opening = self.open()
        request = await workload.request()
        request.respond(200)
        return await opening, request

    def value(self, name: str, **labels: str) -> float:
        """A metric's value; 0 if there is no such sample yet."""
        return value_of(self.metrics.collect(), name, labels)


@asynccontextmanager
async def serving(
    folder: Path,
    *rules: ReverseRule,
    siblings: int = 1,
    mesh: Mesh | None = None,
    drain_timeout_s: float = PATIENCE_S,
    wall_clock: Callable[[], float] = time.time,
    **settings: Any,
) -> AsyncIterator[ReversePort]:
    """A reverse port on loopback with `rules`, else OWN_NAME, and `settings`, until the block ends."""
    mesh = mesh or Mesh(folder)
    wanted = ReverseSettings(
        **{
            "certificates": mesh.member(GATEWAY),
            "rules": rules or (OWN_NAME,),
            "listen": (Address("127.0.0.1", 0),),
            **settings,
        }
    )
    async with access_lines() as lines:
        metrics = TunnelMetrics()
        listener = ReverseListener(
            wanted,
            lines.log,
            metrics,
            siblings=siblings,
            limits=Limits(drain_timeout_s=drain_timeout_s),
            wall_clock=wall_clock,
        )
        port = ReversePort(mesh, listener, metrics, lines)
        try:
            await listener.start()
            yield port
        finally:
            await listener.close()

"""The HBONE port in this process, without the rest of hgate, and members of a mesh that come to it."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from gateway.config.hbone_settings import HboneSettings
from gateway.config.limit_settings import Limits
from gateway.hbone.hbone_port import HboneListener
from gateway.reverse.reverse_port import ReverseListener
from gateway.rules.hbone_rules import Rule
from shared.address import Address
from shared.credentials.certificates.authority import Authority
from shared.net.tls import certificate_folder
from shared.net.tls.mesh_tls import MeshIdentity
from shared.ops.metrics import TunnelMetrics
from shared.trust.spiffe import SpiffeId
from tests.support.gateway_output import AccessLines, access_lines, value_of
from tests.support.http2_peer import Http2Peer
from tests.support.last_bytes import last_bytes_are_gone
from tests.support.revocation import put, revocation_list
from tests.support.tcp_peer import PATIENCE_S

TRUST_DOMAIN = "demo.local"
GATEWAY = SpiffeId.of_workload(TRUST_DOMAIN, "istio-system", "hgate")
CALLER = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "client")

TO_LOOPBACK = Rule((str(CALLER),), ("127.0.0.0/8:*", "[::1]:*", "localhost:*"))
"""Lets the caller to whatever a test listens with."""

CONNECT_TIMEOUT_S = 5.0


class Mesh:
    """An authority and the folders of those to whom it gave certificates."""

    def __init__(
        self, folder: Path, trust_domain: str = TRUST_DOMAIN, authority: Authority | None = None
    ) -> None:
        """`authority` None: one whose root names the trust domain, so it vouches for no other."""
        self.authority = authority or Authority.create(trust_domain)
        self._folder = folder

    def member(self, identity: SpiffeId = CALLER, **how: Any) -> Path:
        """A folder with a certificate for `identity`, issued as `how` says, and the roots."""
        folder = self.folder_of(identity)
        self.authority.write(folder, self.authority.issue(identity, **how))
        return folder

    def folder_of(self, identity: SpiffeId) -> Path:
        """Where `member` puts it."""
        return self._folder / f"{identity.trust_domain}{identity.path.replace('/', '_')}"

    def client(self, identity: SpiffeId = CALLER) -> MeshIdentity:
        """Who a client of ours is, if it wants the gateway."""
        return MeshIdentity(self.member(identity), (str(GATEWAY),))

    def tls(self, folder: Path | None, *, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
        """For a client that is not ours and shows the certificate in `folder`, or none."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.minimum_version = context.maximum_version = version
        context.load_verify_locations(cadata=self.authority.root_pem.decode())
        context.set_alpn_protocols(["h2"])
        if folder is not None:
            chain, key, _ = certificate_folder.find(folder).all
            context.load_cert_chain(chain, key)
        return context


L = TypeVar("L", HboneListener, ReverseListener)


class OwnPort(Generic[L]):
    """A port of hgate's without the rest of it, and what it tells."""

    def __init__(self, mesh: Mesh, listener: L, metrics: TunnelMetrics, lines: AccessLines) -> None:
        self.mesh = mesh
        self.listener: L = listener
        self.metrics = metrics
        self._lines = lines
        self._changed = asyncio.Event()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self.listener.addresses[0].port

    async def line(self) -> dict[str, Any]:
        """The next line of the access log."""
        return await self._lines.next()


class HbonePort(OwnPort[HboneListener]):
    """Made by `serving`."""

    @asynccontextmanager
    async def caller(self, identity: SpiffeId = CALLER) -> AsyncIterator[Http2Peer]:
        """A connection of a member of the mesh, played by the h2 library."""
        async with Http2Peer.connected(self.port, self.mesh.tls(self.mesh.member(identity))) as peer:
            yield peer

    async def until(self, connections: int) -> None:
        """Returns when so many connections are open."""
        async with asyncio.timeout(PATIENCE_S):
            while self.listener.open_connections != connections:
                self._changed.clear()
                await self._changed.wait()

    def value(self, name: str, **labels: str) -> float:
        """A metric's value; 0 if there is no such sample yet."""
        self.listener.count_bytes()
        return value_of(self.metrics.collect(), name, labels)

    def change(self) -> None:
        """The listener's `changed`."""
        self._changed.set()


@asynccontextmanager
async def serving(
    folder: Path,
    *rules: Rule,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    mesh: Mesh | None = None,
    lists: tuple[int, ...] | None = None,
    drain_timeout_s: float = PATIENCE_S,
    wall_clock: Callable[[], float] = time.time,
    **settings: Any,
) -> AsyncIterator[HbonePort]:
    """An HBONE port on loopback with `rules`, else TO_LOOPBACK, and `settings`, until the block ends. `lists`
    are the serial numbers in the file `crl`."""
    mesh = mesh or Mesh(folder)
    if lists is not None:
        put(settings["crl"], revocation_list(mesh.authority, *lists))
    own = mesh.member(GATEWAY)
    wanted = HboneSettings(
        **{
            "certificates": own,
            "rules": rules or (TO_LOOPBACK,),
            "listen": (Address("127.0.0.1", 0),),
            **settings,
        }
    )
    async with access_lines() as lines:
        metrics = TunnelMetrics()
        listener = HboneListener(
            wanted,
            lines.log,
            metrics,
            limits=Limits(connect_timeout_s=connect_timeout_s, drain_timeout_s=drain_timeout_s),
            changed=lambda: port.change(),
            wall_clock=wall_clock,
        )
        port = HbonePort(mesh, listener, metrics, lines)
        try:
            await listener.start()
            yield port
        finally:
            await listener.close()
            await last_bytes_are_gone()

"""A front end between a container and clients that the test plays, with tokens and certificates."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from hbone.cloudrun.front_end import FrontEnd
from hbone.cloudrun.limits import FrontEndLimits
from shared.address import Address
from shared.credentials.certificates.authority import Authority
from shared.trust.jwt_check import Issuer, TokenChecker
from tests.support.http2_peer import Http2Peer

HOST = "hello.a.run.app"
URL = f"https://{HOST}"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Whom the front end believes, and whom its clients do."""

    issuer: Issuer
    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Credentials:
        authority = Authority.create("cloudrun.local")
        pair = authority.issue(dns_names=(HOST,), ip_addresses=("127.0.0.1",), client=False)
        (folder / "cert.pem").write_bytes(pair.certificate_pem)
        (folder / "key.pem").write_bytes(pair.key_pem)
        (folder / "ca.pem").write_bytes(authority.root_pem)
        return cls(Issuer(), folder)

    def token(self, audience: str = URL, *, lifetime_s: float = 3600) -> str:
        return self.issuer.mint(audience, email="gateway@local", lifetime_s=lifetime_s)

    def bearer(self) -> tuple[bytes, bytes]:
        """The header that lets a request in."""
        return b"authorization", f"Bearer {self.token()}".encode()

    @asynccontextmanager
    async def front_end(
        self,
        container: int,
        limits: FrontEndLimits | None = None,
        *,
        is_open: bool = False,
        invokers: Collection[str] = (),
        is_internal: bool = False,
    ) -> AsyncIterator[int]:
        """Serves on the port that it yields; `is_open`: without a token."""
        checker = None if is_open else TokenChecker(self.issuer.public_keys, {URL}, self.issuer.name)
        served = FrontEnd(
            Address("127.0.0.1", container),
            checker,
            limits or FrontEndLimits(),
            invokers=invokers,
            is_internal=is_internal,
        )
        files = (self.folder / "cert.pem", self.folder / "key.pem")
        address = await served.start(Address("127.0.0.1", 0), *files)
        try:
            yield address.port
        finally:
            served.close()

    @asynccontextmanager
    async def client(self, port: int) -> AsyncIterator[Http2Peer]:
        """A connection of HTTP/2 over TLS until the block ends."""
        tls = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        tls.set_alpn_protocols(["h2"])
        async with Http2Peer.connected(port, tls, HOST) as peer:
            assert peer.tls.selected_alpn_protocol() == "h2"
            yield peer

"""The mesh's mTLS through a gateway that routes by SNI, such as hgate's port 15442.

Each connection is a TLS connection of its own, from here to what ends the mTLS in the container: the gateway
carries it and cannot read it. The name chooses the service; who answers has to prove a SPIFFE ID. The
certificate is read again when its file changes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from hbone.forward.reports import log
from shared import regular_files
from shared.address import Address
from shared.errors import DialError, HboneError, UnavailableError, UpstreamError, UsageError
from shared.net.dial import dial_protocol
from shared.net.legs.contract import Leg
from shared.net.legs.tls import TlsServerLeg
from shared.net.legs.tls_client import TlsClientLeg
from shared.net.legs.tls_handshake import client_context
from shared.net.tls import certificate_folder
from shared.net.tls.certificate_files import CertificateFiles
from shared.net.tls.root_files import trust_bundles
from shared.trust.peer_patterns import TrustDomain, check_pattern
from shared.trust.peer_policy import PeerPolicy
from shared.trust.spiffe import SCHEME, peer_id

ALPN = ("istio",)
"""What a sidecar offers for TCP: from then on the bytes are the app's."""

CONNECT_TIMEOUT_S = 10.0
"""For TCP to the gateway."""

PROBES = 3
"""That go unanswered before a connection is given up."""

HANDSHAKE_TIMEOUT_S = 60.0
"""For TLS with the container: a service that has scaled to zero starts first."""


class SniGateway:
    """The service of one name, behind a gateway, as a way."""

    def __init__(
        self,
        gateway: Address,
        name: str,
        files: tuple[Path, Path, Path],
        peers: Sequence[str],
        keepalive_s: float = 0.0,
    ) -> None:
        """`files` are our chain, its key and the mesh's roots. `peers` are patterns, one of which the service
        has to match; empty: our own trust domain. A silent gateway is asked for a sign of life after
        `keepalive_s` seconds, 0: never.

        Raises:
            UsageError: a pattern is none.
            UnavailableError, ConfigError: a file cannot be used.
        """
        self._gateway = gateway
        self._name = name
        self._keepalive_s = keepalive_s
        chain, key, roots = files
        domain = _own_trust_domain(chain)
        try:
            policy = PeerPolicy(peers or (f"{SCHEME}{domain}/**",), trust=TrustDomain(domain))
        except ValueError as error:
            raise UsageError(f"--peer: {error}") from error
        bundles = trust_bundles(roots.parent / certificate_folder.BUNDLES_FILE)

        def verify(proved: list[bytes]) -> None:
            policy.check(bundles.proved(proved))

        self._files = CertificateFiles(
            files,
            lambda: client_context(chain, key, roots, verify, ALPN),
            log=logging.getLogger(f"{log.name}.certificates"),
            purpose=f"certificate {chain}",
        )
        self._files.read()

    @classmethod
    def of(
        cls,
        gateway: Address,
        name: str,
        cert: Path | None,
        key: Path | None,
        ca: Path | None,
        peers: Sequence[str],
        keepalive_s: float = 0.0,
    ) -> SniGateway:
        """By the flags of a command line. Without `ca` the roots are beside the certificate, by their
        customary name. Raises likewise, and UsageError if a flag is missing or wrong."""
        if cert is None or key is None:
            raise UsageError("--sni needs --cert and --key")
        if not (name.isascii() and name.isprintable() and 0 < len(name) <= 255) or " " in name:
            raise UsageError(f"--sni {name!a}: no name that TLS can send")
        for pattern in peers:
            try:
                check_pattern(pattern, TrustDomain("any.domain"))
            except ValueError as error:
                raise UsageError(f"--peer {pattern}: {error}") from error
        roots = ca or certificate_folder.find(cert.parent).roots
        if ca is None and not roots.exists():
            raise UsageError(f"--sni: no root certificates in {cert.parent}; name them with --ca")
        return cls(gateway, name, (cert, key, roots), peers, keepalive_s)

    def __str__(self) -> str:
        return f"{self._name} by way of {self._gateway}"

    async def open(self) -> TlsClientLeg:
        """A connection whose handshake is complete, to be joined at once. Raises HboneError."""
        context = self._files.current(asyncio.get_running_loop().time())
        shaking = _Handshake()
        leg = await dial_protocol(
            self._gateway,
            CONNECT_TIMEOUT_S,
            lambda _: TlsClientLeg(context, shaking, self._name, handshake_timeout_s=HANDSHAKE_TIMEOUT_S),
        )
        if self._keepalive_s and (sock := leg.get_extra_info("socket")) is not None:
            keep_alive(sock, self._keepalive_s)
        try:
            await shaking.done
        except BaseException:
            leg.abort()
            raise
        return leg

    def cause(self, error: HboneError, leg: Leg, age_s: float) -> str:
        """As `Way` has it. With TLS 1.3 a refusal of our certificate comes after the handshake."""
        return f"ended after {age_s:.1f} s: {error}"


def keep_alive(sock: socket.socket, interval_s: float) -> None:
    """Has the kernel end a TCP connection whose peer is gone: TLS has nothing like PING. It asks after
    `interval_s` seconds of silence, three times within as many more (tcp(7))."""
    seconds = max(1, round(interval_s))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {
        "TCP_KEEPIDLE": seconds,
        "TCP_KEEPALIVE": seconds,  # macOS calls it so
        "TCP_KEEPINTVL": max(1, seconds // PROBES),
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": 2000 * seconds,  # milliseconds, for bytes that nobody acknowledges
    }
    for name, value in wanted.items():
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class _Handshake:
    """Waits for a handshake (an `Owner`)."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def established(self, leg: TlsServerLeg) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def refused(self, leg: TlsServerLeg, error: HboneError) -> None:
        if not self.done.done():
            kind = DialError if isinstance(error, UpstreamError) else type(error)
            self.done.set_exception(kind(str(error)))

    def closed(self, leg: TlsServerLeg) -> None:
        if not self.done.done():
            self.done.set_exception(DialError("tls handshake: the connection was closed"))


def _own_trust_domain(chain: Path) -> str:
    """Of the first certificate in the file. Raises UnavailableError or DeniedError."""
    try:
        own = x509.load_pem_x509_certificate(regular_files.read(chain, regular_files.MAX_PEM_BYTES))
    except OSError as error:
        raise UnavailableError(f"--cert {chain}: {error.strerror or error}") from error
    except ValueError as error:
        raise UnavailableError(f"--cert {chain}: no certificate in PEM") from error
    return peer_id(own.public_bytes(Encoding.DER)).trust_domain

"""An authority in this process that signs by a clock of the test's, and can be told to fail in every way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from shared.credentials.certificates.authority import Authority
from shared.credentials.certificates.signing import Signed
from shared.errors import SigningError
from shared.trust.spiffe import SpiffeId

YEARS_S = 20 * 365 * 86400.0


class FaultyAuthority:
    """A `Signer` over a throw-away root that outlives every test's clock."""

    name = "the test's CA"

    def __init__(self, trust_domain: str, now: Callable[[], float]) -> None:
        self.authority = Authority.create(trust_domain, lifetime_s=YEARS_S)
        self.now = now
        self.fault = ""
        """What is wrong, "" for nothing: away, hangs, garbage, empty, key, identity, two names, expired,
        future, root, roots."""
        self.lifetime_s: float | None = None
        """What it gives; None: what is asked for."""
        self.names_roots = True
        self.asked: list[float] = []
        """When it was asked."""

    async def sign(self, request_pem: bytes, lifetime_s: float) -> Signed:
        self.asked.append(self.now())
        if self.fault == "away":
            raise SigningError(f"{self.name}: connection refused")
        if self.fault == "hangs":
            await asyncio.Event().wait()
        if self.fault == "garbage":
            return Signed(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
        if self.fault == "empty":
            return Signed(b"")
        roots = self.authority.root_pem if self.names_roots else b""
        if self.fault == "roots":
            roots = b"no roots at all"
        return Signed(self._leaf(request_pem, self.lifetime_s or lifetime_s), roots)

    def _leaf(self, request_pem: bytes, lifetime_s: float) -> bytes:
        request = x509.load_pem_x509_csr(request_pem)
        assert request.is_signature_valid
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        if self.fault == "identity":
            names = _names("spiffe://demo.local/ns/other/sa/stranger")
        if self.fault == "two names":
            names = _names("spiffe://demo.local/ns/demo/sa/hello", "spiffe://demo.local/ns/demo/sa/b")
        other = Authority.create(self.authority.trust_domain)
        signer = other if self.fault == "root" else self.authority
        key = ec.generate_private_key(ec.SECP256R1()).public_key() if self.fault == "key" else None
        moved = {"expired": -2 * lifetime_s, "future": 2 * lifetime_s}.get(self.fault, 0.0)
        start = datetime.fromtimestamp(self.now() + moved, UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(signer.root.subject)
            .public_key(key or request.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + timedelta(seconds=lifetime_s))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(names, critical=True)
            .sign(signer.key, hashes.SHA256())
            .public_bytes(Encoding.PEM)
        )


def identity(name: str = "hello") -> SpiffeId:
    """Whom it certifies in most tests."""
    return SpiffeId.of_workload("demo.local", "demo", name)


def _names(*uris: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])

"""A throw-away certificate authority for the demo, the tests and local development.

Owns the making of X509-SVIDs: a root that lives in memory and leaves that it signs, valid for days. Not for
production, where the mesh has its own authority; nothing here guards, rotates or revokes a key.
Counterpart: `spiffe`, which reads the names back.
"""

from __future__ import annotations

import ipaddress
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shared.identity.spiffe import SpiffeId

BACKDATED_S = 300
"""How far `not_before` lies back: clocks of containers and laptops differ by seconds, seldom by minutes."""

ROOT_LIFETIME_S = 7 * 24 * 3600
"""A root that outlives a week of local work, and no more."""

LEAF_LIFETIME_S = 24 * 3600
"""What Istio gives a workload certificate by default."""

# File names under /var/run/secrets/workload-spiffe-credentials, where Istio's proxy looks for them.
CERTIFICATES_FILE = "certificates.pem"
PRIVATE_KEY_FILE = "private_key.pem"
ROOTS_FILE = "ca_certificates.pem"

PUBLIC_MODE = 0o644
PRIVATE_MODE = 0o600


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and the key it belongs to, both in PEM; the key is kept out of `repr`."""

    certificate_pem: bytes
    key_pem: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Authority:
    """The root of one trust domain, with its key."""

    trust_domain: str
    root: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @classmethod
    def create(cls, trust_domain: str, *, lifetime_s: float = ROOT_LIFETIME_S) -> Authority:
        """Makes a new root (EC P-256) for `trust_domain`, valid for `lifetime_s` seconds from now.

        Raises ValueError when `trust_domain` is not a valid one.
        """
        identity = SpiffeId(trust_domain, "")
        key = ec.generate_private_key(ec.SECP256R1())
        # The attribute's limit is 64 characters (X.520), a trust domain's 255.
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"throw-away CA of {trust_domain}"[:64])])
        now = datetime.now(UTC)
        root = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(seconds=BACKDATED_S))
            .not_valid_after(now + timedelta(seconds=lifetime_s))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(_alternative_names([identity], (), ()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(trust_domain, root, key)

    @property
    def root_pem(self) -> bytes:
        """The root certificate in PEM: what peers have to trust."""
        return self.root.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        spiffe_id: SpiffeId | None = None,
        *,
        dns_names: Iterable[str] = (),
        ip_addresses: Iterable[str] = (),
        lifetime_s: float = LEAF_LIFETIME_S,
        server: bool = True,
        client: bool = True,
    ) -> KeyPair:
        """Issues a leaf (EC P-256) for these names, valid for `lifetime_s` seconds from now, never longer
        than the root; down to minus 300 it is one that has expired already.

        Raises ValueError when there is no name, no use (`server`, `client`), or a malformed IP address.
        """
        identities = [] if spiffe_id is None else [spiffe_id]
        names = _alternative_names(identities, dns_names, ip_addresses)
        uses = [ExtendedKeyUsageOID.SERVER_AUTH] * server + [ExtendedKeyUsageOID.CLIENT_AUTH] * client
        if not uses:
            raise ValueError("certificate for nothing: neither for servers nor for clients")
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.root.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(seconds=BACKDATED_S))
            .not_valid_after(min(now + timedelta(seconds=lifetime_s), self.root.not_valid_after_utc))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
            # Critical, because the subject is empty (RFC 5280 section 4.1.2.6).
            .add_extension(names, critical=True)
            .sign(self.key, hashes.SHA256())
        )
        return KeyPair(
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )

    def write(self, folder: str | os.PathLike[str], key_pair: KeyPair) -> None:
        """Writes `key_pair` and the root into `folder` under the names that Istio's proxy expects, making
        the folder when it is missing. Each file appears whole or not at all; the certificate comes last, so
        whoever watches it finds the other two in place.

        Raises OSError when the folder cannot be made or written.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        _write_atomically(target / ROOTS_FILE, self.root_pem, PUBLIC_MODE)
        _write_atomically(target / PRIVATE_KEY_FILE, key_pair.key_pem, PRIVATE_MODE)
        _write_atomically(target / CERTIFICATES_FILE, key_pair.certificate_pem, PUBLIC_MODE)


def _alternative_names(
    identities: Iterable[SpiffeId], dns_names: Iterable[str], ip_addresses: Iterable[str]
) -> x509.SubjectAlternativeName:
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(str(identity)) for identity in identities]
    names += [x509.DNSName(name) for name in dns_names]
    names += [x509.IPAddress(ipaddress.ip_address(address)) for address in ip_addresses]
    if not names:
        raise ValueError("certificate for nobody: it needs a SPIFFE ID, a DNS name or an IP address")
    return x509.SubjectAlternativeName(names)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """X509-SVID section 4.3: roots sign certificates, leaves sign handshakes, neither does the other."""
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_atomically(path: Path, content: bytes, mode: int) -> None:
    # mkstemp opens the file with mode 0600, so a key is never readable by others, not even for a moment.
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

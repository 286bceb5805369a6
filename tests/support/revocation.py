"""Revocation lists for tests: of an authority that is there, and of one with an intermediate."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from shared.atomic_files import PUBLIC_MODE, write_atomically
from shared.credentials.certificates.authority import Authority, KeyPair
from shared.net.tls.certificate_folder import CERTIFICATES_FILE, ROOTS_FILE
from shared.trust.spiffe import SpiffeId
from tests.support import odd_chains

HOUR_S = 3600.0


def serial(key_pair: KeyPair) -> int:
    """The serial number of its (first) certificate."""
    return x509.load_pem_x509_certificates(key_pair.certificate_pem)[0].serial_number


def serial_in(folder: Path) -> int:
    """That of the certificate in `folder`."""
    return x509.load_pem_x509_certificates((folder / CERTIFICATES_FILE).read_bytes())[0].serial_number


def end_in(folder: Path) -> float:
    """When the certificate in `folder` ends, in seconds since the epoch."""
    (certificate, *_) = x509.load_pem_x509_certificates((folder / CERTIFICATES_FILE).read_bytes())
    return certificate.not_valid_after_utc.timestamp()


def revocation_list(
    authority: Authority,
    *serials: int,
    due_s: float | None = HOUR_S,
    extensions: Iterable[tuple[x509.ExtensionType, bool]] = (),
    entry_extensions: Iterable[tuple[x509.ExtensionType, bool]] = (),
    encoding: Encoding = Encoding.PEM,
) -> bytes:
    """A list of `authority` that revokes `serials` and is to be replaced in `due_s` seconds."""
    now = datetime.now(UTC)
    update = timedelta(seconds=HOUR_S if due_s is None else due_s)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.root.subject)
        .last_update(now - timedelta(days=1))
        .next_update(now + update)
    )
    for value, critical in extensions:
        builder = builder.add_extension(value, critical)
    for number in serials:
        entry = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(now)
        for value, critical in entry_extensions:
            entry = entry.add_extension(value, critical)
        builder = builder.add_revoked_certificate(entry.build())
    return builder.sign(authority.key, hashes.SHA256()).public_bytes(encoding)


def chain(pair: KeyPair, root: Authority) -> list[bytes]:
    """What TLS has verified, in DER: the certificates that are shown, and the root."""
    shown = x509.load_pem_x509_certificates(pair.certificate_pem)
    return [one.public_bytes(Encoding.DER) for one in (*shown, root.root)]


def put(file: Path, *lists: bytes) -> None:
    """The file as whoever distributes it replaces it."""
    write_atomically(file, b"".join(lists), PUBLIC_MODE)


class Hierarchy:
    """A root, and an intermediate by which it issues."""

    def __init__(self, trust_domain: str = "demo.local") -> None:
        made: dict[str, Any] = {"ends_s": 30 * 24 * HOUR_S, "identifier": False}
        root = odd_chains.authority(f"root of {trust_domain}", **made)
        below = odd_chains.authority(f"intermediate of {trust_domain}", root, serial=4710, **made)
        self.root, self.intermediate = (
            Authority(trust_domain, x509.load_der_x509_certificate(one.der), one.key) for one in (root, below)
        )

    def issue(self, identity: SpiffeId) -> KeyPair:
        """A leaf of the intermediate, with it in its chain."""
        leaf = self.intermediate.issue(identity)
        return KeyPair(leaf.certificate_pem + self.intermediate.root_pem, leaf.key_pem)

    def write(self, folder: Path, key_pair: KeyPair) -> None:
        """As `Authority.write`."""
        self.root.write(folder, key_pair)

    @property
    def root_pem(self) -> bytes:
        """What peers trust."""
        return self.root.root_pem


def trust(folder: Path, *roots: bytes) -> None:
    """Replaces the roots in `folder`."""
    write_atomically(folder / ROOTS_FILE, b"".join(roots), PUBLIC_MODE)

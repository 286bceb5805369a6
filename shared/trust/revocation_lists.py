"""Certificate revocation lists as files have them (RFC 5280 section 5): read, and whether an issuer has
signed one. No I/O and no clock.

Delta lists, lists about other issuers' certificates, and unknown critical extensions are refused: they would
need more than what is here.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from shared.trust.spiffe import shown

if TYPE_CHECKING:
    from cryptography import x509

MAX_FILE_BYTES = 8 << 20
"""Of all lists: some 200,000 revoked certificates, half a second to read in a thread. Workload certificates
live for a day, so lists of a mesh have a few."""

MAX_LISTS = 256
"""In one file: an issuer has one each."""

_PEM = re.compile(rb"-----BEGIN ([A-Z0-9 ]{1,40})-----(.*?)-----END \1-----", re.DOTALL)
_PEM_LABEL = b"X509 CRL"


@dataclass(frozen=True, slots=True)
class RevocationList:
    """One list, as its issuer has signed it."""

    crl: x509.CertificateRevocationList
    issuer_name: x509.Name
    """Read once: whoever reads a malformed one is warned each time, on standard error."""

    serials: frozenset[int]
    """Of the certificates that are revoked."""

    _verdicts: dict[bytes, bool] = field(default_factory=dict, repr=False, compare=False)
    """Whether it is signed by a key, by the key's hash: to find out takes 0.1 s for the longest lists."""

    @property
    def issuer(self) -> str:
        """For people."""
        return shown(self.issuer_name.rfc4514_string())

    @property
    def next_update(self) -> datetime | None:
        """By when there will be a newer one."""
        return self.crl.next_update_utc

    def signed_by(self, issuer: x509.Certificate) -> bool:
        """Whether it is, by a key that may sign lists (RFC 5280 section 6.3.3 (f) and (g)). Raises ValueError
        if the issuer's certificate cannot be read."""
        from cryptography import x509

        try:
            usage = issuer.extensions.get_extension_for_class(x509.KeyUsage).value
        except x509.ExtensionNotFound:
            pass
        except (x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
            raise ValueError(f"an issuer's certificate cannot be read: {error}") from error
        else:
            if not usage.crl_sign:
                return False
        key = key_hash(issuer)
        if key not in self._verdicts:
            self._verdicts[key] = self._is_signed_by(issuer)
        return self._verdicts[key]

    def _is_signed_by(self, issuer: x509.Certificate) -> bool:
        from cryptography.exceptions import UnsupportedAlgorithm

        try:
            # Another kind of key is no signer's.
            return self.crl.is_signature_valid(issuer.public_key())  # type: ignore[arg-type]
        except (TypeError, ValueError, UnsupportedAlgorithm):
            return False


def key_hash(certificate: x509.Certificate) -> bytes:
    """A short hash of its public key. Raises ValueError if that cannot be read."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    try:
        key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except UnsupportedAlgorithm as error:
        raise ValueError(f"a key that cannot be read: {error}") from error
    return hashlib.sha256(key).digest()[:16]


def parse(content: bytes) -> tuple[RevocationList, ...]:
    """The lists in a file's `content`, PEM or DER, one or several.

    Raises ValueError with the reason if there is none, one is malformed, or there is anything else.
    """
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"over {MAX_FILE_BYTES} bytes")
    pieces = _pem(content) if b"-----BEGIN" in content else _der(content)
    if not pieces:
        raise ValueError("holds no certificate revocation list")
    if len(pieces) > MAX_LISTS:
        raise ValueError(f"holds {len(pieces)} lists, more than {MAX_LISTS}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a later version of cryptography will refuse
        return tuple(map(_list, pieces))


def _pem(content: bytes) -> list[bytes]:
    import base64

    pieces: list[bytes] = []
    for label, body in _PEM.findall(content):
        if label != _PEM_LABEL:
            raise ValueError(f"holds a {label.decode('ascii')}, which is no certificate revocation list")
        pieces.append(base64.b64decode(b"".join(body.split()), validate=True))
    if len(pieces) != content.count(b"-----BEGIN"):
        raise ValueError("a PEM block is cut off")
    return pieces


def _der(content: bytes) -> list[bytes]:
    """One after the other: each says its length (X.690 section 8.1.3)."""
    pieces: list[bytes] = []
    at = 0
    while at < len(content) and len(pieces) <= MAX_LISTS:
        header = content[at : at + 2]
        if len(header) < 2 or header[0] != 0x30:
            raise ValueError("is neither PEM nor DER")
        size, start = header[1], at + 2
        if size >= 0x80:
            count = size & 0x7F
            if not 1 <= count <= 4:
                raise ValueError("is neither PEM nor DER")
            size, start = int.from_bytes(content[start : start + count], "big"), start + count
        if start + size > len(content):
            raise ValueError("is cut off")
        pieces.append(content[at : start + size])
        at = start + size
    return pieces


def _list(der: bytes) -> RevocationList:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        crl = x509.load_der_x509_crl(der)
        for extension in crl.extensions:
            _check_extension(extension)
        entries = list(crl)
        for entry in entries:
            _check_entry(entry)
        # Parsed when they are asked for: done here, so that every later look is sure to succeed.
        issuer = crl.issuer
        _ = crl.last_update_utc, crl.next_update_utc, issuer.rfc4514_string()
        return RevocationList(crl, issuer, frozenset(entry.serial_number for entry in entries))
    except (
        x509.DuplicateExtension,
        x509.InvalidVersion,
        x509.UnsupportedGeneralNameType,
        UnsupportedAlgorithm,
        TypeError,
    ) as error:
        raise ValueError(f"a list cannot be read: {error}") from error


def _check_extension(extension: x509.Extension[x509.ExtensionType]) -> None:
    from cryptography import x509

    value = extension.value
    if isinstance(value, x509.DeltaCRLIndicator):
        raise ValueError("a delta list: only complete ones can be used")
    if isinstance(value, x509.IssuingDistributionPoint):
        if value.indirect_crl:
            raise ValueError("an indirect list, about certificates of other issuers")
    elif extension.critical and isinstance(value, x509.UnrecognizedExtension):
        raise ValueError(f"a list has a critical extension that is not known: {value.oid.dotted_string}")


def _check_entry(entry: x509.RevokedCertificate) -> None:
    from cryptography import x509

    for extension in entry.extensions:
        if extension.critical and isinstance(
            extension.value, x509.CertificateIssuer | x509.UnrecognizedExtension
        ):
            oid = extension.oid.dotted_string
            raise ValueError(f"an entry has a critical extension that is not known: {oid}")

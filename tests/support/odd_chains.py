"""Certificate chains as authorities in the field make them: well formed, odd, and not to be trusted.

Made by hand where the library of the other tests refuses to: a serial number of zero or below, and the first
version of X.509, are built from the DER of a certificate that it does make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NAME = "api.example.test"
"""The server's, in each leaf."""

_SEQUENCE, _BIT_STRING, _INTEGER, _VERSION, _EXTENSIONS = 0x30, 0x03, 0x02, 0xA0, 0xA3


@dataclass(frozen=True, slots=True)
class Made:
    """A certificate with its key."""

    der: bytes
    key: ec.EllipticCurvePrivateKey
    subject: x509.Name

    @property
    def pem(self) -> bytes:
        """The certificate."""
        import base64

        lines = base64.encodebytes(self.der)
        return b"-----BEGIN CERTIFICATE-----\n" + lines + b"-----END CERTIFICATE-----\n"

    @property
    def key_pem(self) -> bytes:
        """The key."""
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@dataclass(frozen=True, slots=True)
class Chain:
    """What a client trusts, and what a server shows."""

    trusted: bytes
    """PEM."""

    shown: bytes
    """PEM, the leaf first."""

    key: bytes
    name: str = NAME
    """The host name that the client asks for."""

    def write(self, folder: Path) -> None:
        """Into files that `tls_verdicts.py` reads."""
        folder.mkdir()
        (folder / "trusted.pem").write_bytes(self.trusted)
        (folder / "shown.pem").write_bytes(self.shown)
        (folder / "key.pem").write_bytes(self.key)
        (folder / "name").write_text(self.name)


Parts = tuple[x509.ExtensionType, bool]


def authority(
    name: str = "an authority",
    issuer: Made | None = None,
    *,
    ends_s: float = 3600,
    ca: bool = True,
    path_length: int | None = None,
    critical: bool = True,
    constraints: bool = True,
    usage: bool = True,
    identifier: bool = True,
    serial: int = 4711,
) -> Made:
    """An authority, its own issuer unless there is one. The switches leave out what RFC 5280 demands."""

    def extensions(key: ec.EllipticCurvePublicKey) -> Iterator[Parts]:
        if constraints:
            yield x509.BasicConstraints(ca=ca, path_length=path_length), critical
        if usage:
            yield _usage(signs=ca), True
        if identifier:
            yield x509.SubjectKeyIdentifier.from_public_key(key), False
            if issuer is not None:
                yield x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key()), False

    return _made(_named(name), issuer, extensions, ends_s=ends_s, serial=serial)


def leaf(
    issuer: Made, *, subject: str = NAME, identifier: bool = True, server: bool = True, serial: int = 4712
) -> Made:
    """A server's certificate for NAME and localhost."""

    def extensions(key: ec.EllipticCurvePublicKey) -> Iterator[Parts]:
        yield x509.SubjectAlternativeName([x509.DNSName(NAME), x509.DNSName("localhost")]), True
        yield x509.BasicConstraints(ca=False, path_length=None), True
        use = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
        yield x509.ExtendedKeyUsage([use]), False
        if identifier:
            yield x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key()), False

    return _made(_named(subject), issuer, extensions, serial=serial)


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _made(
    subject: x509.Name,
    issuer: Made | None,
    extensions: Callable[[ec.EllipticCurvePublicKey], Iterator[Parts]],
    *,
    ends_s: float = 3600,
    serial: int,
) -> Made:
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(max(serial, 1))
        .not_valid_before(now - timedelta(hours=2))
        .not_valid_after(now + timedelta(seconds=ends_s))
    )
    for extension, is_critical in extensions(key.public_key()):
        builder = builder.add_extension(extension, is_critical)
    signing = key if issuer is None else issuer.key
    certificate = builder.sign(signing, hashes.SHA256())
    if serial > 0:
        return Made(certificate.public_bytes(Encoding.DER), key, subject)
    parts = _parts(_content(certificate.tbs_certificate_bytes))
    parts[1] = _der(_INTEGER, serial.to_bytes(1, "big", signed=True))
    return Made(_signed(parts, signing), key, subject)


def first_version(certificate: Made) -> Made:
    """`certificate`, its own issuer, as X.509 version 1 has it: without any extension."""
    parts = _parts(_content(_parts(_content(certificate.der))[0]))
    kept = [part for part in parts if part[0] not in (_VERSION, _EXTENSIONS)]
    return Made(_signed(kept, certificate.key), certificate.key, certificate.subject)


def _signed(parts: list[bytes], key: ec.EllipticCurvePrivateKey) -> bytes:
    """The certificate of these fields (RFC 5280 section 4.1); the signature's algorithm is that of the part
    behind the serial number."""
    body = _der(_SEQUENCE, b"".join(parts))
    algorithm = parts[2] if parts[0][0] == _VERSION else parts[1]
    signature = _der(_BIT_STRING, b"\x00" + key.sign(body, ec.ECDSA(hashes.SHA256())))
    return _der(_SEQUENCE, body + algorithm + signature)


def _der(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


def _head(der: bytes) -> tuple[int, int]:
    """Where the content of the first value begins and ends."""
    if der[1] < 0x80:
        return 2, 2 + der[1]
    begin = 2 + (der[1] & 0x7F)
    return begin, begin + int.from_bytes(der[2:begin], "big")


def _content(der: bytes) -> bytes:
    begin, end = _head(der)
    return der[begin:end]


def _parts(der: bytes) -> list[bytes]:
    parts = []
    while der:
        _, end = _head(der)
        parts.append(der[:end])
        der = der[end:]
    return parts


def _usage(*, signs: bool) -> x509.KeyUsage:
    others = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    )
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
        **others,
    )


def _shown(root: Made, *chain: Made, trusted: bytes = b"", name: str = NAME) -> Chain:
    return Chain(trusted or root.pem, b"".join(one.pem for one in chain), chain[0].key_pem, name)


def _of(root: Made, **switches: Any) -> Chain:
    return _shown(root, leaf(root, **switches))


def good() -> dict[str, Chain]:
    """What every client accepts."""
    root = authority()
    issuing = authority("an issuing authority", root)
    return {"by the book": _of(root), "by the book, three": _shown(root, leaf(issuing), issuing)}


def odd() -> dict[str, Chain]:
    """What RFC 5280 forbids the authority to issue, and proves as much as any other."""
    no_identifier = authority(identifier=False)
    issuing = authority("an issuing authority", no_identifier, identifier=False)
    return {
        "no key identifiers": _of(no_identifier, identifier=False),
        "no key identifiers, three": _shown(no_identifier, leaf(issuing, identifier=False), issuing),
        "no subject key identifier": _of(no_identifier),
        "no authority key identifier": _of(authority(), identifier=False),
        "constraints not critical": _of(authority(critical=False)),
        "no key usage": _of(authority(usage=False)),
        "constraints missing": _of(authority(constraints=False)),
        "first version": _of(first_version(authority())),
        "root's serial 0": _of(authority(serial=0)),
        "root's serial -1": _of(authority(serial=-1)),
        "leaf's serial 0": _shown(root := authority(), leaf(root, serial=0)),
        "leaf's serial -1": _shown(root := authority(), leaf(root, serial=-1)),
    }


def anchored() -> dict[str, Chain]:
    """Where the file has no root, but a part of the chain below it."""
    root = authority()
    issuing = authority("an issuing authority", root)
    server = leaf(issuing)
    return {
        "issuing authority": _shown(root, server, issuing, trusted=issuing.pem),
        "issuing authority, not shown": _shown(root, server, trusted=issuing.pem),
        "the leaf itself": _shown(root, server, issuing, trusted=server.pem),
    }


def bad() -> dict[str, Chain]:
    """What nobody may accept."""
    root, ended = authority(), authority(ends_s=-60)
    no_authority = authority("no authority", root, ca=False)
    narrow = authority(path_length=0)
    below = authority("below", narrow)
    stranger, middle = authority(), leaf(root, subject="a leaf")
    forged = authority("an authority", identifier=False)
    return {
        "expired authority": _of(ended),
        "issuer is no authority": _shown(root, leaf(no_authority), no_authority),
        "issuer is a leaf": _shown(root, leaf(middle), middle),
        "issuer is a leaf that is trusted": _shown(root, leaf(middle), trusted=middle.pem),
        "path too long": _shown(narrow, leaf(below), below),
        "another authority": _shown(root, leaf(stranger)),
        "another authority of the same name": _shown(forged, leaf(stranger, identifier=False)),
        "for clients": _of(root, server=False),
        "issuer missing": _shown(root, leaf(authority("an issuing authority", root))),
    }


WRONG_NAME = "another name"
"""The one that only a check of host names refuses."""


def all_chains() -> dict[str, Chain]:
    """Each of them."""
    root = authority()
    named = {WRONG_NAME: _shown(root, leaf(root), name="other.example.test")}
    return good() | odd() | anchored() | bad() | named

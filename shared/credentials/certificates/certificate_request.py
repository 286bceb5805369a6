"""A new key, and the request by which an authority is asked to certify it (PKCS #10, RFC 2986)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from shared.trust.spiffe import SpiffeId

KeyKind = Literal["ec", "rsa"]
"""EC P-256, or RSA with 2048 bits for peers that know nothing else."""

KEY_KINDS: tuple[KeyKind, ...] = get_args(KeyKind)

RSA_BITS = 2048
"""What Istio's agent accepts for workloads; keys live for a day."""


@dataclass(frozen=True, slots=True)
class CertificateRequest:
    """A key that nobody else has, and what asks for its certificate."""

    identity: SpiffeId
    request_pem: bytes
    public_key_der: bytes
    """SubjectPublicKeyInfo, by which the answer is recognised."""
    key_pem: bytes = field(repr=False)
    """PKCS #8, not encrypted."""


def new_request(identity: SpiffeId, kind: KeyKind = "ec") -> CertificateRequest:
    """Makes a key and the request for `identity`, the only name in it. EC takes 0.1 ms, RSA 100 ms and more,
    so RSA is no matter for the event loop's thread."""
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
    if kind == "rsa":
        key = rsa.generate_private_key(public_exponent=65537, key_size=RSA_BITS)
    else:
        key = ec.generate_private_key(ec.SECP256R1())
    name = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(str(identity))])
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        # Critical, because the subject is empty (RFC 5280 section 4.1.2.6).
        .add_extension(name, critical=True)
        .sign(key, hashes.SHA256())
    )
    return CertificateRequest(
        identity,
        request.public_bytes(serialization.Encoding.PEM),
        key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )

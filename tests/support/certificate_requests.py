"""Certificate requests as tests need them: good ones, and some that no authority should sign."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from shared.credentials.certificates.signing import Signer
from shared.errors import SigningError
from tests.support.error_texts import told

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey


def key_pem(key: Key) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def request_pem(key: Key, *names: x509.GeneralName) -> bytes:
    """A request signed with `key`, for `names` if there are some."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(key, algorithm).public_bytes(Encoding.PEM)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def gives(token: str) -> Callable[[], Awaitable[str]]:
    """A source of nothing but this token, with which an authority is asked."""

    async def source() -> str:
        return token

    return source


async def refusal(signer: Signer, *secrets: str) -> str:
    """What the error says when `signer` does not sign; neither it nor its causes may have a secret."""
    with pytest.raises(SigningError) as caught:
        await signer.sign(request_pem(new_key()), 3600)
    for secret in secrets:
        assert secret not in told(caught.value)
        assert secret[-12:] not in told(caught.value)
    return str(caught.value)

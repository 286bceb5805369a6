"""Private keys in PEM: which are read, and what is said of the others."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)

from shared.net.tls.private_key import parse

Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey


def pem(key: Key, encryption: KeySerializationEncryption | None = None) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())


@pytest.mark.parametrize(
    "key",
    [ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(65537, 2048)],
    ids=["EC", "RSA"],
)
def test_a_key(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
    assert parse(pem(key)).private_numbers() == key.private_numbers()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            pem(ec.generate_private_key(ec.SECP256R1()), BestAvailableEncryption(b"secret")),
            "the private key is encrypted",
        ),
        (b"", "no private key in PEM"),
        (b"no key", "no private key in PEM"),
        (pem(ed25519.Ed25519PrivateKey.generate()), "the private key is neither RSA nor EC"),
    ],
    ids=["encrypted", "empty", "no PEM", "another kind"],
)
def test_keys_that_are_of_no_use(text: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}$"):
        parse(text)

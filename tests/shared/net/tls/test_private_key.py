"""Private keys in PEM that are read; what is said of the others has `test_certificate_check.py`."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from shared.net.tls.private_key import parse


@pytest.mark.parametrize(
    "key",
    [ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(65537, 2048)],
    ids=["EC", "RSA"],
)
def test_a_key(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    assert parse(pem).private_numbers() == key.private_numbers()

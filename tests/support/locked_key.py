"""Private keys that want a passphrase."""

from __future__ import annotations

from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)


def locked(key_pem: bytes) -> bytes:
    """The same key, encrypted."""
    key = load_pem_private_key(key_pem, None)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))

"""The TLS alert for a client that has keys already: one record under a TLS 1.3 traffic secret.

Owns the bytes of that record, because OpenSSL sends alerts for its own reasons only. When the secret is
known and whether the record may still be the first under it is the handshake's matter
(`shared/net/legs/tls_handshake.py`). Counterpart: `alerts.py`, for clients that have no keys yet.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from shared.tls import alerts

_SEALED = 23  # application_data, the outer type of every sealed record (RFC 8446 section 5.2)
_TAG_BYTES = 16  # of all three ciphers
_IV_BYTES = 12

_HEADER = struct.Struct("!BHH")


class _Suite(NamedTuple):
    hash: hashes.HashAlgorithm
    aead: type[AESGCM] | type[ChaCha20Poly1305]
    key_bytes: int


_SUITES = {
    "TLS_AES_128_GCM_SHA256": _Suite(hashes.SHA256(), AESGCM, 16),
    "TLS_AES_256_GCM_SHA384": _Suite(hashes.SHA384(), AESGCM, 32),
    "TLS_CHACHA20_POLY1305_SHA256": _Suite(hashes.SHA256(), ChaCha20Poly1305, 32),
}

SUITES = tuple(_SUITES)
"""The TLS 1.3 cipher suites that can be spoken here, best first (RFC 8446 appendix B.4)."""


def sealed_alert(description: int, suite: str, secret: bytes) -> bytes:
    """A fatal alert as the first record under a traffic secret (RFC 8446 sections 5.2, 5.3 and 7.3).

    `suite` is one of SUITES. Raises ValueError for another one, and if `description` is not in 0..255.
    """
    if suite not in _SUITES:
        raise ValueError(f"cipher suite {suite}: not one of {', '.join(SUITES)}")
    algorithm, aead, key_bytes = _SUITES[suite]
    plaintext = alerts.message(description) + bytes((alerts.CONTENT_ALERT,))
    header = _HEADER.pack(_SEALED, alerts.LEGACY_VERSION, len(plaintext) + _TAG_BYTES)
    key = _expand(algorithm, secret, b"key", key_bytes)
    # The nonce is the IV combined with the record's number, which is 0.
    nonce = _expand(algorithm, secret, b"iv", _IV_BYTES)
    return header + aead(key).encrypt(nonce, plaintext, header)


def _expand(algorithm: hashes.HashAlgorithm, secret: bytes, label: bytes, size: int) -> bytes:
    """HKDF-Expand-Label with an empty context (RFC 8446 section 7.1)."""
    label = b"tls13 " + label
    info = size.to_bytes(2, "big") + bytes((len(label),)) + label + b"\0"
    return HKDFExpand(algorithm, size, info).derive(secret)

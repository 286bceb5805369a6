"""A private key in PEM, RSA or EC: no workload certificate has another kind.

Read without OpenSSL, which would ask the terminal for the passphrase of an encrypted key.
"""

from __future__ import annotations

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key


def parse(pem: bytes) -> RSAPrivateKey | EllipticCurvePrivateKey:
    """The key in `pem`. Raises ValueError with the reason, which has nothing of the text in it."""
    try:
        key = load_pem_private_key(pem, None)
    except TypeError:
        raise ValueError("the private key is encrypted") from None
    except (ValueError, UnsupportedAlgorithm):
        # Without the original, whose text may have something of the file.
        raise ValueError("no private key in PEM") from None
    if not isinstance(key, RSAPrivateKey | EllipticCurvePrivateKey):
        raise ValueError("the private key is neither RSA nor EC")
    return key

"""Certificate requests as tests need them: good ones, and some that no authority should sign."""

from __future__ import annotations

import traceback

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey


def request_pem(key: Key, *names: x509.GeneralName) -> bytes:
    """A request signed with `key`, for `names` if there are some."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(key, algorithm).public_bytes(Encoding.PEM)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def told(error: BaseException) -> str:
    """All that a log could show of an error: its text, its causes, the traceback."""
    return "".join(traceback.format_exception(error))

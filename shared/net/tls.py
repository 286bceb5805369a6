"""TLS contexts for the HTTP/2 connections: the outer TLS of a tunnel, either end.

The mesh's own mTLS inside the tunnel is not ours to open; the built-in end of it is `tls_leg.py`'s.
"""

from __future__ import annotations

import functools
import ssl
from pathlib import Path

from shared.errors import UnavailableError

ALPN_H2 = "h2"


@functools.lru_cache(maxsize=64)
def client_context(ca: Path | None) -> ssl.SSLContext:
    """Trusts the certificates in `ca` only, or the system's when None; offers h2 and nothing else.

    Kept per file: loading the system's roots takes 10 ms and 3 MiB each time.

    Raises:
        UnavailableError: the file cannot be read or holds no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ssl.SSLError) as error:
        raise UnavailableError(f"trusted certificates: {ca}: {error.strerror or error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([ALPN_H2])
    return context


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Serves with a certificate chain and its key, both PEM; takes h2 by ALPN.

    Raises:
        UnavailableError: a file cannot be read, or they do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([ALPN_H2])
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise UnavailableError(f"certificate {certificate}, key {key}: {error.strerror or error}") from error
    return context

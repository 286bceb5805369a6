"""TLS contexts for the HTTP/2 connections: the outer TLS of a tunnel, either end.

The mesh's own mTLS inside the tunnel is not ours to open; the built-in end of it is `tls_leg.py`'s.
"""

from __future__ import annotations

import functools
import logging
import ssl
from pathlib import Path

from shared.errors import UnavailableError
from shared.net.certificate_files import CertificateFiles

log = logging.getLogger("hbone.tls")

ALPN_H2 = "h2"

MAX_FILES = 64
"""Files of trusted certificates whose context is kept; beyond it the least used is read again."""


def client_context(ca: Path | None, now: float) -> ssl.SSLContext:
    """Trusts the certificates in `ca` only, or the system's when None; offers h2 and nothing else. For a
    connection that begins `now` (the loop's clock, seconds).

    Kept per file, as loading the system's roots takes 10 ms and 3 MiB each time, and made anew when the file
    has changed. A new file that is no good leaves the old one in use.

    Raises:
        UnavailableError: the file cannot be read or holds no certificate, and never did.
    """
    return _trusted(ca).current(now)


def read_again(ca: Path | None) -> None:
    """Reads the file at once, for connections to come. Raises UnavailableError if it is no good; then the old
    one stays in use."""
    _trusted(ca).read()


@functools.lru_cache(maxsize=MAX_FILES)
def _trusted(ca: Path | None) -> CertificateFiles[ssl.SSLContext]:
    purpose = f"trusted certificates {ca}" if ca else "the system's trusted certificates"
    files = CertificateFiles(_files(ca), lambda: _client_context(ca), log=log, purpose=purpose, own=False)
    files.read()
    return files


def _files(ca: Path | None) -> list[Path]:
    if ca is not None:
        return [ca]
    system = ssl.get_default_verify_paths()  # a renewal of the folder's files changes the folder
    return [Path(path) for path in (system.cafile, system.capath) if path]


def _client_context(ca: Path | None) -> ssl.SSLContext:
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
        # A password that no key has: without one OpenSSL would ask the terminal for an encrypted key's.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        raise UnavailableError(f"certificate {certificate}, key {key}: {error.strerror or error}") from error
    return context

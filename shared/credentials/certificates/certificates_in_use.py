"""The certificates that this process has in use, for its admin port and its metrics.

Those are the files as they were when they could last be used. The files in the folder may have changed since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from shared.net.tls.certificate_files import in_use
from shared.ops.families import CERTIFICATE_EXPIRY, CERTIFICATE_START

if TYPE_CHECKING:
    from cryptography import x509
    from prometheus_client import Metric


def rows() -> list[dict[str, Any]]:
    """Each certificate with its chain and its roots, in the form of Envoy's /certs."""
    from shared.credentials.certificates.certificate_report import describe_all

    now = datetime.now(UTC)
    return [
        {
            "certificate": files.purpose,
            "path": str(files.chain_file),
            "ca_path": str(files.roots_file),
            **describe_all(_readable(files.chain_pem), _readable(files.roots_pem), now),
        }
        for files in in_use()
    ]


def families() -> Iterator[Metric]:
    """When each certificate expires, or the first one of its chain, and since when that is valid."""
    lives: dict[str, tuple[float, float]] = {}
    for files in in_use():
        for certificate in _readable(files.chain_pem):
            life = certificate.not_valid_after_utc.timestamp(), certificate.not_valid_before_utc.timestamp()
            lives[files.purpose] = min(life, lives.get(files.purpose, life))
    yield CERTIFICATE_EXPIRY.metric((purpose, end) for purpose, (end, _) in lives.items())
    yield CERTIFICATE_START.metric((purpose, start) for purpose, (_, start) in lives.items())


def _readable(pem: bytes) -> Sequence[x509.Certificate]:
    """The certificates in `pem`; none if we cannot read what OpenSSL could."""
    from shared.trust import roots

    try:
        return roots.parse(pem)
    except ValueError:
        return ()

"""What people and programs are told of certificates: names, times, kinds; never a key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding

from shared.net.tls.certificate_check import kind_of, shown
from shared.trust.spiffe import ids_of
from shared.trust.trust_bundles import TrustBundles

SHOWN_CHARS = 200
"""Of a name in a certificate, which is somebody else's text."""


def describe(certificate: x509.Certificate, now: datetime) -> dict[str, Any]:
    """A certificate of a chain, as of `now`; seconds."""
    return {
        "identity": _identity(certificate),
        "serial": f"{certificate.serial_number:x}",
        "subject": _name(lambda: certificate.subject),
        "issuer": _name(lambda: certificate.issuer),
        "not_before": shown(certificate.not_valid_before_utc),
        "not_after": shown(certificate.not_valid_after_utc),
        "remaining_s": round((certificate.not_valid_after_utc - now).total_seconds()),
        "key": _kind(certificate),
    }


def describe_root(
    root: x509.Certificate, now: datetime, bundles: TrustBundles | None = None
) -> dict[str, Any]:
    """A root, as of `now`; `bundles` tells whose it is, if its own name does not."""
    return {
        "subject": _name(lambda: root.subject),
        "trust_domain": ", ".join(sorted((bundles or TrustBundles()).domains_of(root))),
        "serial": f"{root.serial_number:x}",
        "not_after": shown(root.not_valid_after_utc),
        "remaining_s": round((root.not_valid_after_utc - now).total_seconds()),
    }


def describe_all(
    chain: Sequence[x509.Certificate],
    trusted: Sequence[x509.Certificate],
    now: datetime,
    bundles: TrustBundles | None = None,
) -> dict[str, Any]:
    """A chain and roots, in Envoy's words for the two (its admin port's /certs)."""
    return {
        "cert_chain": [describe(certificate, now) for certificate in chain],
        "ca_cert": [describe_root(root, now, bundles) for root in trusted],
    }


def duration(seconds: float) -> str:
    """A time span in its two largest units: `23 h 59 min`."""
    left = int(abs(seconds))
    for unit_s, unit, small_s, small in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if left >= unit_s:
            return f"{left // unit_s} {unit} {left % unit_s // small_s} {small}"
    return f"{left} s"


def until(remaining_s: float) -> str:
    """How long something is valid, in words."""
    return f"{duration(remaining_s)} left" if remaining_s > 0 else f"expired {duration(remaining_s)} ago"


def _identity(certificate: x509.Certificate) -> str:
    try:
        return ", ".join(str(identity) for identity in ids_of(certificate.public_bytes(Encoding.DER)))
    except ValueError:
        return ""


def _kind(certificate: x509.Certificate) -> str:
    try:
        return kind_of(certificate.public_key()) or "other"
    except (UnsupportedAlgorithm, ValueError):
        return "other"


def _name(read: Callable[[], x509.Name]) -> str:
    try:
        text = read().rfc4514_string()
    except ValueError:  # read on first access only
        return ""
    return (text if text.isprintable() else ascii(text))[:SHOWN_CHARS]

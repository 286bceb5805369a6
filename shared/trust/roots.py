"""Root certificates in PEM and in SPIFFE's map of bundles: read, joined without duplicates, written."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from shared.errors import ConfigError
from shared.trust.spiffe import SpiffeId

MAX_BYTES = 4 << 20
"""Of one file or text: a thousand roots of 4 KiB. More is no bundle of a mesh."""

MAX_ROOTS = 1000
"""All together; each handshake's verification looks through them."""


def parse(pem: bytes) -> list[x509.Certificate]:
    """The certificates of a PEM text, whatever stands between them. Raises ValueError if one cannot be read,
    or there is none; the reason has nothing of the text."""
    if len(pem) > MAX_BYTES:
        raise ValueError(f"longer than {MAX_BYTES} bytes")
    try:
        found = x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion):
        raise ValueError("no certificates in PEM, or broken ones") from None
    if len(found) > MAX_ROOTS:
        raise ValueError(f"more than {MAX_ROOTS} certificates")
    return found


def merge(*pems: bytes) -> bytes:
    """All certificates of these texts, each once, in order; empty texts are passed over. Raises ValueError
    as `parse` does."""
    return to_pem(root for pem in pems if pem.strip() for root in parse(pem))


def to_pem(roots: Iterable[x509.Certificate]) -> bytes:
    """Each once, in order. Raises ValueError if there are too many."""
    once = dict.fromkeys(root.public_bytes(Encoding.PEM) for root in roots)
    if len(once) > MAX_ROOTS:
        raise ValueError(f"more than {MAX_ROOTS} certificates")
    return b"".join(once)


def trust_domain(root: x509.Certificate) -> str:
    """The trust domain that an authority's certificate names in its URI, "" if it names none (X509-SVID
    section 4.2 has it as an option, and Istio's own roots lack it). A URI with a path names a workload: old
    samples of Istio's have istiod's own there."""
    try:
        names = root.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        named = SpiffeId.parse(uris[0]) if uris else None
        return named.trust_domain if named and not named.path else ""
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        return ""


def bundle_map(content: bytes, name: str) -> dict[str, list[x509.Certificate]]:
    """The roots of each trust domain in SPIFFE's map of bundles, GKE's `trust_bundles.json`:
    `{"trust_domains": {TRUST_DOMAIN: {"keys": [{"use": "x509-svid", "x5c": [DER in base64]}]}}}` (SPIFFE
    Trust Domain and Bundle, section 4). Keys for other uses are passed over. Raises ConfigError with `name`.
    """
    try:
        domains = json.loads(content[: MAX_BYTES + 1])["trust_domains"]
        return {
            SpiffeId(domain, "").trust_domain: [_key(key) for key in bundle["keys"] if _is_for_x509(key)]
            for domain, bundle in domains.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise ConfigError(name, None, "", "no map of SPIFFE bundles") from None


def _is_for_x509(key: Mapping[str, Any]) -> bool:
    return key.get("use") == "x509-svid"


def _key(key: Mapping[str, Any]) -> x509.Certificate:
    try:
        return x509.load_der_x509_certificate(base64.b64decode(key["x5c"][0], validate=True))
    except (binascii.Error, x509.InvalidVersion) as error:
        raise ValueError("no certificate") from error

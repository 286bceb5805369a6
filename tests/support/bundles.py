"""SPIFFE's map of bundles, as GKE puts it beside a workload's certificate."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from shared.atomic_files import PUBLIC_MODE, write_atomically
from shared.credentials.certificates.authority import Authority
from shared.net.tls.certificate_folder import BUNDLES_FILE

OTHER_KEY = {"kty": "EC", "use": "jwt-svid", "kid": "1"}


def bundles(domains: dict[str, list[Authority]]) -> bytes:
    """The map: by trust domain the authorities whose roots it lists, beside a key of another use."""
    return json.dumps(
        {
            "trust_domains": {
                domain: {"spiffe_sequence": 1, "keys": [OTHER_KEY, *map(_key, authorities)]}
                for domain, authorities in domains.items()
            }
        }
    ).encode()


def tell(folder: Path, domains: dict[str, list[Authority]]) -> None:
    """Puts it where a certificate is."""
    write_atomically(folder / BUNDLES_FILE, bundles(domains), PUBLIC_MODE)


def _key(authority: Authority) -> dict[str, object]:
    der = authority.root.public_bytes(Encoding.DER)
    return {"kty": "EC", "use": "x509-svid", "x5c": [base64.b64encode(der).decode()]}

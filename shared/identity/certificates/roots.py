"""Root certificates: read from all the places that have some, and put together.

Owned here: the places and their errors, duplicates, the form that SPIFFE gives to the roots of several trust
domains. Not owned: whether a chain leads to one of them (`certificate_check.py`, the TLS libraries).

Whose names a root may vouch for is `trust_bundles.py`'s matter.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from shared import regular_files
from shared.errors import ConfigError, UnavailableError
from shared.identity.spiffe import SpiffeId

MAX_BYTES = 4 << 20
"""Of one file or text: a thousand roots of 4 KiB. More is no bundle of a mesh."""

MAX_ROOTS = 1000
"""All together; each handshake's verification looks through them."""

JSON_SUFFIX = ".json"
"""Of a file that is SPIFFE's map of bundles."""

ISTIO_ROOT_FILE = Path("/var/run/secrets/istio/root-cert.pem")
"""Where Istio's injection mounts the ConfigMap istio-ca-root-cert."""


@dataclass(frozen=True, slots=True)
class RootSources:
    """Where roots come from; read again on each `read`, for ConfigMaps change."""

    texts: Mapping[str, str] = field(default_factory=dict)
    """PEM by the name of the setting that has it: CAROOT_ISTIOD, CAROOT_CAS."""

    files: tuple[Path, ...] = ()
    """PEM, or SPIFFE's map of bundles if the name ends with .json; each has to be there."""

    optional_files: tuple[Path, ...] = (ISTIO_ROOT_FILE,)
    """The same, but one that does not exist is passed over."""

    def read(self) -> bytes:
        """All of them in PEM, each once; b"" if there are none.

        Raises:
            UnavailableError: a file is missing or cannot be read.
            ConfigError: a file, or a setting, has no certificates or too many.
        """
        found: list[x509.Certificate] = []
        for name, text in self.texts.items():
            # A manifest's one-line value often has the two characters in place of the line's end.
            found += _parse(text.replace("\\n", "\n").encode(), name)
        for file in self._there():
            found += read_file(file)
        try:
            return to_pem(found)
        except ValueError as error:
            raise ConfigError("root certificates", None, "", str(error)) from error

    def read_bundles(self) -> bytes:
        """What the files that are maps of bundles tell together, as one such map; b"" if there is none.
        Raises as `read`."""
        together: dict[str, dict[str, list[Any]]] = {}
        for file in self._there():
            if file.suffix == JSON_SUFFIX:
                content = _content(file)
                bundle_map(content, str(file))  # whether it is one
                for domain, bundle in json.loads(content)["trust_domains"].items():
                    together.setdefault(domain, {"keys": []})["keys"] += bundle["keys"]
        return json.dumps({"trust_domains": together}, sort_keys=True).encode() if together else b""

    def _there(self) -> list[Path]:
        """All files but optional ones that do not exist."""
        return [*self.files, *filter(_is_there, self.optional_files)]


def _is_there(file: Path) -> bool:
    try:
        file.stat()
    except FileNotFoundError:
        return False
    except OSError:
        pass  # reading it says why
    return True


def read_file(file: Path) -> list[x509.Certificate]:
    """The roots in `file`, PEM or `trust_bundles.json`. Raises UnavailableError or ConfigError."""
    if file.suffix == JSON_SUFFIX:
        return [root for roots in read_bundles(file).values() for root in roots]
    return _parse(_content(file), str(file))


def read_bundles(file: Path) -> dict[str, list[x509.Certificate]]:
    """The roots of each trust domain in `file`, a `trust_bundles.json`. Raises likewise."""
    return bundle_map(_content(file), str(file))


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


def _content(file: Path) -> bytes:
    try:
        return regular_files.read(file, MAX_BYTES)
    except OSError as error:
        raise UnavailableError(f"root certificates: {file}: {error.strerror or error}") from error


def _is_for_x509(key: Mapping[str, Any]) -> bool:
    return key.get("use") == "x509-svid"


def _key(key: Mapping[str, Any]) -> x509.Certificate:
    try:
        return x509.load_der_x509_certificate(base64.b64decode(key["x5c"][0], validate=True))
    except (binascii.Error, x509.InvalidVersion) as error:
        raise ValueError("no certificate") from error


def _parse(pem: bytes, name: str) -> list[x509.Certificate]:
    try:
        return parse(pem)
    except ValueError as error:
        raise ConfigError(name, None, "", f"no usable root certificates: {error}") from error

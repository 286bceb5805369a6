"""Root certificates read from settings and files: PEM, or SPIFFE's map of bundles (`trust_bundles.json`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509

from shared import regular_files
from shared.errors import ConfigError, UnavailableError
from shared.trust.roots import MAX_BYTES, bundle_map, parse, to_pem
from shared.trust.trust_bundles import TrustBundles

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


def trust_bundles(file: Path) -> TrustBundles:
    """What SPIFFE's map of bundles in `file` tells of whose roots are whose; a missing file tells nothing.
    Raises UnavailableError if it cannot be read, ConfigError if it is no such map."""
    try:
        return TrustBundles(read_bundles(file))
    except UnavailableError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return TrustBundles()
        raise
    except ValueError as error:
        raise ConfigError(str(file), None, "", str(error)) from error


def _content(file: Path) -> bytes:
    return regular_files.read_needed(file, MAX_BYTES, "root certificates")


def _parse(pem: bytes, name: str) -> list[x509.Certificate]:
    try:
        return parse(pem)
    except ValueError as error:
        raise ConfigError(name, None, "", f"no usable root certificates: {error}") from error

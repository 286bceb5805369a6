"""The lists that the process at the API server hands to those with the tunnels: three files in one folder.

`routes.json` has the routes that objects ask for, `endpoints.json` the endpoints of Services, and
`addresses.json` which address is whose. Each is replaced as a whole; until the first list of objects is
complete there is no `routes.json`. All are JSON, which is read a hundred times as fast as YAML.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from gateway.rules.cluster_rules import Endpoints, ServiceRoute
from shared import regular_files
from shared.atomic_files import PUBLIC_MODE, write_atomically
from shared.errors import UnavailableError

ROUTES = "routes.json"
ENDPOINTS = "endpoints.json"
ADDRESSES = "addresses.json"

MAX_ROUTES = 10_000
"""Routes from objects. Each is 0.5 KB in the file and 2 KiB in each process."""

MAX_ADDRESSES = 50_000
"""Addresses of Services that routes take by name: 70 bytes each in the file, 0.2 KiB in each process."""

MAX_FILE_BYTES = 64 * 1024 * 1024
"""100,000 endpoints are 3 MB."""

_FIELDS = frozenset(field.name for field in fields(ServiceRoute))


def write_routes(folder: Path, routes: Iterable[ServiceRoute]) -> None:
    """Hands routes over. Raises UnavailableError if the folder cannot be written."""
    _write(folder / ROUTES, {"routes": [asdict(route) for route in routes]})


def write_endpoints(folder: Path, endpoints: Endpoints) -> None:
    """Hands endpoints over. Raises UnavailableError if the folder cannot be written."""
    _write(folder / ENDPOINTS, {"services": endpoints})


def write_addresses(folder: Path, names: Mapping[str, str]) -> None:
    """Hands over the Service's name of each address. Raises UnavailableError if the folder cannot be
    written."""
    _write(folder / ADDRESSES, {"addresses": names})


def clean(folder: Path) -> None:
    """Removes what a process that was killed has left half written; the folder is memory."""
    for name in (ROUTES, ENDPOINTS, ADDRESSES):
        for left in folder.glob(f".{name}.*"):
            left.unlink(missing_ok=True)


def read_routes(folder: Path) -> tuple[ServiceRoute, ...] | None:
    """The routes that were handed over last; None if there are none yet. Raises UnavailableError if the file
    cannot be read."""
    found = _read(folder / ROUTES, "routes", list)
    if found is None:
        return None
    try:
        return tuple(_route(one) for one in found[:MAX_ROUTES])
    except (TypeError, ValueError) as error:
        raise UnavailableError(f"broken list in {folder / ROUTES}: {error}") from error


def read_endpoints(folder: Path) -> Endpoints:
    """The endpoints that were handed over last. Raises UnavailableError if the file cannot be read."""
    return _read(folder / ENDPOINTS, "services", dict) or {}


def read_addresses(folder: Path) -> Mapping[str, str]:
    """The names of addresses that were handed over last. Raises UnavailableError if the file cannot be
    read."""
    return _read(folder / ADDRESSES, "addresses", dict) or {}


def _route(found: Any) -> ServiceRoute:
    if not isinstance(found, dict) or found.keys() != _FIELDS:
        raise ValueError(f"a route has the fields {', '.join(sorted(_FIELDS))}")
    return ServiceRoute(**{name: str(value) for name, value in found.items()})  # type: ignore[arg-type]


def _write(path: Path, content: object) -> None:
    try:
        text = json.dumps(content, separators=(",", ":"), sort_keys=True)
        write_atomically(path, text.encode(), PUBLIC_MODE)
    except OSError as error:
        reason = error.strerror or error
        raise UnavailableError(f"cannot write {path}: {reason}; cluster.folder has to be ours") from error


def _read(path: Path, key: str, kind: type) -> Any:
    """What the file has under `key`; None if there is no file."""
    try:
        found = json.loads(regular_files.read(path, MAX_FILE_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UnavailableError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get(key), kind):
        raise UnavailableError(f"cannot read {path}: it has no {key}")
    return found[key]

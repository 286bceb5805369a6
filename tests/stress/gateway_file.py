"""hgate's file: fixed ports, routes by the names that the clients' hellos ask for, and its changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.stress.programs import Program
from tests.support.world import free_port

TUNNELS_PER_CONNECTION = 200
"""hgate's limit, below the 250 streams that krun accepts: 10,000 tunnels then fit into the 64 connections
that hgate makes to an origin at most."""

DEFAULT_LIMITS = {
    "max_connections": 20_000,
    "streams_per_connection": TUNNELS_PER_CONNECTION,
    "drain_timeout": "20s",
    # A target that is dead stays dead here; one retry shows that these leave nothing behind, either.
    "max_retries": 1,
}


class GatewayFile:
    """hgate's file, with fixed ports so that a successor can share them."""

    def __init__(self, path: Path, routes: Sequence[Mapping[str, Any]], limits: Mapping[str, Any]) -> None:
        self.path = path
        self.port, self.admin, self.metrics, self.health = (free_port() for _ in range(4))
        self._routes = routes
        self._limits = {**DEFAULT_LIMITS, **limits}
        self.write()

    def write(self, *more_routes: Mapping[str, Any]) -> None:
        """Puts a whole new file in the old one's place, as an editor or a ConfigMap does; JSON is YAML."""
        content = {
            "listen": [f"127.0.0.1:{self.port}"],
            "admin": f"127.0.0.1:{self.admin}",
            "metrics": f"127.0.0.1:{self.metrics}",
            "health": f"127.0.0.1:{self.health}",
            "limits": self._limits,
            "routes": [*self._routes, *more_routes],
        }
        self.put(json.dumps(content, indent=1))

    def put(self, text: str) -> None:
        """The same with any text."""
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.replace(self.path)


def start_hgate(
    name: str, file: GatewayFile, folder: Path, environ: Mapping[str, str] | None = None
) -> Program:
    """Starts a gateway with this file, and `environ` beside our own."""
    return Program(name, ["gateway", "--config", str(file.path), "--log-format", "json"], folder, environ)


def route(name: str, port: int, target: str) -> dict[str, Any]:
    """A route for the host of `name`, outbound_.PORT_._.HOST, to a target of the krun on a loopback port."""
    return {
        "host": name.rpartition("_.")[2],
        "tunnel": f"http://krun.example/_hbone/{target}",
        "connect": f"127.0.0.1:{port}",
        "token": "none",
    }

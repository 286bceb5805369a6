"""A service that is registered by what `hbone register --print` prints."""

from __future__ import annotations

import subprocess
from typing import Any

import yaml

from tests.mesh.places import BRIDGE, PLACES
from tests.mesh.workloads import SCRIPTS

URL = "https://registered-123456789012.us-central1.run.app"
HOST = "registered.demo.svc.cluster.local"

EFFECT_S = 15.0
"""For what istiod has been told to reach a sidecar."""

PORTS = ("--port", "http:8080", "--port", "grpc:8083")


def printed(*flags: str, ports: tuple[str, ...] = PORTS) -> list[dict[str, Any]]:
    """The manifests for the service behind URL."""
    where = ("-n", "demo", "--gateway", PLACES[BRIDGE], *ports)
    command = [str(SCRIPTS / "hbone"), "register", "--print", URL, *where, *flags]
    return list(yaml.safe_load_all(subprocess.run(command, check=True, capture_output=True).stdout))

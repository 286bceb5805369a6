"""A mesh of several networks: an istiod that knows them, and what it tells ztunnels."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.mesh.control_plane import ADDRESS, ISTIOD, START_S, ControlPlane, answers
from tests.mesh.objects import manifest
from tests.mesh.places import BRIDGE, until
from tests.mesh.registered import HOST, printed

NAMED = f"demo/{HOST}"

TOLD = "http://127.0.0.1:8081/debug/ambientz"
"""Where it says what it gives ztunnels."""

SECURE_PORT = 15112

MESH = """
trustDomain: cluster.local
rootNamespace: istio-system
serviceScopeConfigs:
  - servicesSelector: {matchExpressions: [{key: istio.io/global, operator: In, values: ["true"]}]}
    scope: GLOBAL
"""

EFFECT_S = 15.0
"""For istiod to see what has been written."""


@contextmanager
def multi_network(plane: ControlPlane, gateway_port: int = 15008) -> Iterator[None]:
    """Another istiod of the same cluster. The network `cloud` has its east-west gateway at `gateway_port`."""
    folder = plane.folder / "istiod-ambient"
    (folder / "etc/istio/config").mkdir(parents=True, exist_ok=True)
    (folder / "etc/istio/config/mesh").write_text(MESH)
    *before, gateway = manifest("east-west")
    gateway["spec"]["listeners"][0]["port"] = gateway_port
    plane.objects.apply_as("kubectl", before)
    _serves(plane, "gateways")
    _serves(plane, "gatewayclasses")
    plane.objects.apply_as("kubectl", [gateway])
    command = [
        *(plane.programs.istiod, "discovery", f"--kubeconfig={plane.folder / 'admin.kubeconfig'}"),
        *("--domain=cluster.local", "--httpAddr=127.0.0.1:8081", "--httpsAddr="),
        *("--grpcAddr=127.0.0.1:15110", f"--secureGRPCAddr={ADDRESS}:{SECURE_PORT}"),
        "--monitoringAddr=127.0.0.1:15114",
    ]
    environ = {
        **ISTIOD,
        "POD_NAME": "istiod-1",
        "AMBIENT_ENABLE_MULTI_NETWORK": "true",
        "PILOT_ENABLE_GATEWAY_API": "true",
    }
    process = plane.processes.start("istiod-ambient", BRIDGE, command, environ, cwd=folder)
    try:
        plane.processes.ready(process, lambda: answers("http://127.0.0.1:8081/ready"), START_S)
        yield
    finally:
        process.end()
        plane.objects.delete([gateway])
        plane.objects.apply_as("kubectl", [{**before[0], "metadata": {"name": "istio-system"}}])


def _serves(plane: ControlPlane, plural: str) -> None:
    """Waits until the API server has a kind that it has just been told of."""
    path = f"/apis/gateway.networking.k8s.io/v1/{plural}"
    until(lambda: plane.objects.get(path), EFFECT_S, plural)


@contextmanager
def told(
    plane: ControlPlane,
    url: str,
    *flags: str,
    complete: Callable[[dict[str, Any]], bool] = lambda _: True,
) -> Iterator[dict[str, Any]]:
    """What ztunnels are told once all that `hbone register --print` prints has been applied, and `complete`
    says that it is there."""
    manifests = printed("--workload-account", "hello", *flags)
    plane.objects.apply_as("kubectl", manifests)

    def found() -> dict[str, Any] | None:
        with urllib.request.urlopen(url, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        names = {each["name"] for each in found["workloads"]} | {each["name"] for each in found["services"]}
        if not {f"hbone-registered-{ADDRESS}-15442", "registered"} <= names:
            return None
        return found if (endpoints(found) or not flags) and complete(found) else None

    try:
        yield until(found, EFFECT_S, "istiod tells of the service and its endpoints")
    finally:
        plane.objects.delete(reversed(manifests))


def endpoints(told: dict[str, Any]) -> list[dict[str, Any]]:
    """The workloads of the service."""
    return [each for each in told["workloads"] if NAMED in (each.get("services") or {})]

"""What ambient clients are told of a service that is registered for them.

An istiod of several networks is asked for what it gives ztunnels. No ztunnel runs here.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.mesh.control_plane import ADDRESS, ISTIOD, START_S, ControlPlane, answers
from tests.mesh.objects import manifest
from tests.mesh.places import BRIDGE, until
from tests.mesh.registered import HOST, printed

NAMED = f"demo/{HOST}"

MESH = """
trustDomain: cluster.local
rootNamespace: istio-system
serviceScopeConfigs:
  - servicesSelector: {matchExpressions: [{key: istio.io/global, operator: In, values: ["true"]}]}
    scope: GLOBAL
"""

EFFECT_S = 15.0
"""For istiod to see what has been written."""


@pytest.fixture(scope="module")
def istiod(plane: ControlPlane) -> Iterator[str]:
    """Another istiod of the same cluster: where it tells what it gives ztunnels."""
    folder = plane.folder / "istiod-ambient"
    (folder / "etc/istio/config").mkdir(parents=True)
    (folder / "etc/istio/config/mesh").write_text(MESH)
    *before, gateway = manifest("east-west")
    plane.objects.apply_as("kubectl", before)
    serves(plane, "gateways")
    serves(plane, "gatewayclasses")
    plane.objects.apply_as("kubectl", [gateway])
    command = [
        *(plane.programs.istiod, "discovery", f"--kubeconfig={plane.folder / 'admin.kubeconfig'}"),
        *("--domain=cluster.local", "--httpAddr=127.0.0.1:8081", "--httpsAddr="),
        *("--grpcAddr=127.0.0.1:15110", f"--secureGRPCAddr={ADDRESS}:15112"),
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
        yield "http://127.0.0.1:8081/debug/ambientz"
    finally:
        process.end()
        plane.objects.delete([gateway])
        plane.objects.apply_as("kubectl", [{**before[0], "metadata": {"name": "istio-system"}}])


def serves(plane: ControlPlane, plural: str) -> None:
    """Waits until the API server has a kind that it has just been told of."""
    path = f"/apis/gateway.networking.k8s.io/v1/{plural}"
    until(lambda: plane.objects.get(path), EFFECT_S, plural)


@contextmanager
def told(plane: ControlPlane, url: str, *flags: str) -> Iterator[dict[str, Any]]:
    """What ztunnels are told once all that `hbone register --print` prints has been applied."""
    manifests = printed("--workload-account", "hello", *flags)
    plane.objects.apply_as("kubectl", manifests)

    def complete() -> dict[str, Any] | None:
        with urllib.request.urlopen(url, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        names = {each["name"] for each in found["workloads"]} | {each["name"] for each in found["services"]}
        if not {f"hbone-registered-{ADDRESS}-15442", "registered"} <= names:
            return None
        return found if endpoints(found) or not flags else None

    try:
        yield until(complete, EFFECT_S, "istiod tells of the service and its endpoints")
    finally:
        plane.objects.delete(reversed(manifests))


def endpoints(told: dict[str, Any]) -> list[dict[str, Any]]:
    """The workloads of the service."""
    return [each for each in told["workloads"] if NAMED in (each.get("services") or {})]


def test_clients_ask_the_network_s_gateway_for_a_tunnel(plane: ControlPlane, istiod: str) -> None:
    """It is their only endpoint: hgate's port for sidecars, which expects mTLS, is none of theirs. And they
    expect the workload's account behind it."""
    with told(plane, istiod, "--ambient-network", "cloud") as found:
        (endpoint,) = endpoints(found)
        assert (endpoint["network"], endpoint["tunnelProtocol"]) == ("cloud", "HBONE")
        assert endpoint["networkGateway"]["hboneMtlsPort"] == 15008
        assert [port["servicePort"] for port in endpoint["services"][NAMED]["ports"]] == [8080, 8083]
        (service,) = [each for each in found["services"] if each["name"] == "registered"]
        assert service["subjectAltNames"] == ["spiffe://cluster.local/ns/demo/sa/hello"]


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8080/debug/ambientz", "http://127.0.0.1:8081/debug/ambientz"]
)
def test_without_a_network_they_have_no_endpoint(plane: ControlPlane, istiod: str, url: str) -> None:
    """Rather than one that they would send plain text to."""
    with told(plane, url) as found:
        assert endpoints(found) == []

"""The app's way into the mesh: krun's local port, its CONNECT with istiod's certificate, and what hgate leads
to."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.mesh.places import BRIDGE, PLACES, Process, run_in
from tests.mesh.test_gateway import line_about
from tests.mesh.workloads import AMBIENT, BEHIND, Workloads

ENVIRON = {
    "HBONE_EGRESS_GATEWAY": f"{PLACES[BRIDGE]}:15008",
    "HBONE_EGRESS_PEER": "spiffe://cluster.local/ns/demo/sa/hello",
    "HBONE_EGRESS": f"5080={BEHIND}:18080,5081={AMBIENT}:18080",
}


@pytest.fixture(scope="module")
def krun(mesh: Workloads) -> Iterator[Process]:
    process = mesh.krun("builtin", ENVIRON)
    try:
        mesh.krun_ready(process)
        yield process
    finally:
        process.end()


def asked(port: int) -> str:
    """What the app gets from its own port 127.0.0.1:`port`."""
    return run_in("app", "curl", "-s", "-m", "20", f"http://127.0.0.1:{port}/from-the-container").stdout


def test_a_service_behind_the_gateway(mesh: Workloads, krun: Process) -> None:
    """By its name, which the gateway looks up."""
    assert json.loads(asked(5080))["path"] == "/from-the-container"
    line_about(krun, f"{BEHIND}:18080", "egress")
    line_about(mesh.gateway_process, f"{BEHIND}:18080", "spiffe://cluster.local/ns/demo/sa/hello")


def test_what_the_gateway_denies_to_the_app(mesh: Workloads, krun: Process) -> None:
    """The same app by its address, which is for another account."""
    assert asked(5081) == ""
    for process in (krun, mesh.gateway_process):
        line_about(process, f"{AMBIENT}:18080", "401", "egress" if process is krun else "demo/sa/hello")
    assert json.loads(asked(5080)), "what is allowed goes on"

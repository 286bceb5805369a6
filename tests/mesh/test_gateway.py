"""What else the gateway carries: the mesh's own control plane, and HBONE from a sidecar."""

from __future__ import annotations

import json
import urllib.request

from tests.mesh.places import Process, until
from tests.mesh.workloads import AMBIENT, Workloads, ask

AMBIENT_SERVICE = "ambient.demo.svc.cluster.local"

LINE_S = 10.0
"""For a line of the access log, which is written when the connection ends."""


def line_about(gateway: Process, *what: str) -> str:
    def found() -> str | None:
        lines = gateway.said.splitlines()
        return next((line for line in lines if all(each in line for each in what)), None)

    return until(found, LINE_S, f"a line about {' and '.join(what)}")


def test_a_sidecar_reaches_istiod_through_the_gateway(mesh: Workloads) -> None:
    """guest's: without its certificate and its configuration it would not have got ready."""
    with urllib.request.urlopen("http://127.0.0.1:15000/tunnels", timeout=10) as answer:
        tunnels = json.load(answer)
    assert "istiod.istio-system.svc" in json.dumps(tunnels)


def test_a_sidecar_s_hbone_reaches_an_app_beside_the_gateway(mesh: Workloads) -> None:
    answer = ask("web", "/over-hbone", port=8081, service=AMBIENT_SERVICE)
    assert answer.status == 200, answer.body
    assert '"path": "/over-hbone"' in answer.body


def test_hbone_of_whom_no_rule_lets_in_is_refused(mesh: Workloads) -> None:
    assert ask("guest", port=8081, service=AMBIENT_SERVICE).status == 503
    guest = "spiffe://cluster.local/ns/clients/sa/guest"
    assert "401" in line_about(mesh.gateway_process, guest, f"{AMBIENT}:18080")

"""The original's template for a service, as it is: a user of the original exchanges krun and hgate only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mesh.objects import manifest
from tests.mesh.places import until
from tests.mesh.workloads import Answer, Workloads, ask

NAMED_BY_URL = "fortio-cr-icq63pqnqq-uc.demo.svc.cluster.local"

EFFECT_S = 15.0
"""For what istiod has been told to reach a sidecar."""


@pytest.fixture(scope="module", params=["pilot-agent", "builtin", "envoy"])
def end(mesh: Workloads, request: pytest.FixtureRequest) -> Iterator[str]:
    """Each kind of mTLS end before the app, which runs as the account that the template names."""
    mesh.plane.objects.apply(manifest("template"))
    told = {"WORKLOAD_NAME": "fortio-cr", "WORKLOAD_SERVICE_ACCOUNT": "default"}
    krun = mesh.krun(request.param, told)
    try:
        mesh.krun_ready(krun)
        yield request.param
    finally:
        krun.end()
        mesh.plane.objects.delete(reversed(manifest("template")))


def answered(service: str, port: int) -> Answer:
    def once() -> Answer | None:
        answer = ask("web", "/fortio/", service=service, port=port)
        return answer if answer.status == 200 else None

    return until(once, EFFECT_S, f"{service}:{port} answers")


def test_a_request_to_the_name_in_the_url_arrives(end: str) -> None:
    assert answered(NAMED_BY_URL, 8080).headers["host"].startswith("fortio-cr-icq63pqnqq-uc.demo.svc")


def test_and_one_to_the_service_s_own_name(end: str) -> None:
    """By the VirtualService."""
    assert answered("fortio-cr.demo.svc.cluster.local", 8080).headers["host"].startswith("fortio-cr.demo.svc")

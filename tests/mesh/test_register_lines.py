"""A registered service whose app speaks no HTTP."""

from __future__ import annotations

import os
import sys

import pytest

from tests.mesh.places import run_in, until
from tests.mesh.registered import EFFECT_S, printed
from tests.mesh.workloads import Workloads


@pytest.mark.parametrize("ports", [("tcp:8086",), ("http:8080", "tcp-lines:8086")])
@pytest.mark.parametrize("kind", ["pilot-agent", "builtin", "envoy"])
def test_an_app_that_speaks_no_http(mesh: Workloads, kind: str, ports: tuple[str, ...]) -> None:
    """Its port may be alone, or beside one for HTTP."""
    flags = [word for port in ports for word in ("--port", port)]
    manifests = printed("--workload-account", "hello", *flags, ports=())
    mesh.plane.objects.apply_as("kubectl", manifests)
    krun = mesh.krun(kind, {"WORKLOAD_NAME": "registered"}, "tests.mesh.echo_app")

    def echoed() -> str | None:
        client = ["env", f"PYTHONPATH={os.getcwd()}", sys.executable, "-m", "tests.mesh.line_client"]
        return run_in("web", *client, 8086, "one", "two").stdout or None

    try:
        mesh.krun_ready(krun)
        assert until(echoed, EFFECT_S, "lines come back") == "echo one\necho two\n"
    finally:
        krun.end()
        mesh.plane.objects.delete(reversed(manifests))

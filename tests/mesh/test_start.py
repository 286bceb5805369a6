"""What a start takes in the mesh, step by step, beside pilot-agent by itself in the same place."""

from __future__ import annotations

import re

import pytest

from tests.mesh.workloads import Workloads

STEPS = ["identity", "mTLS end", "app"]

MOST_S = 1.5
"""What krun's own part may take on a machine with other work."""


@pytest.fixture
def alone_s(mesh: Workloads) -> float:
    """Until pilot-agent's Envoy is ready, where no krun is."""
    process = mesh.sidecar("web", "app", "clients", {"app": "web"})
    try:
        return mesh.sidecar_ready(process, "app")
    finally:
        process.end()


@pytest.mark.parametrize("kind", ["pilot-agent", "builtin", "envoy"])
def test_a_start_takes_little_more_than_its_mtls_end(mesh: Workloads, alone_s: float, kind: str) -> None:
    krun = mesh.krun(kind)
    try:
        mesh.krun_ready(krun)
        (told,) = re.findall(r"started in (\S+) s: (.*)$", krun.said, re.MULTILINE)
    finally:
        krun.end()
    took_s = {name: float(seconds) for name, seconds in re.findall(r"([\w ]+?) ([\d.]+) s", told[1])}
    print(f"{kind}: {told[0]} s ({told[1]}); pilot-agent by itself: {alone_s:.2f} s")
    assert [name.strip() for name in took_s] == STEPS
    assert float(told[0]) < MOST_S + (alone_s if kind == "pilot-agent" else 0)

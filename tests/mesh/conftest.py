"""The mesh that these tests share. They are collected by `make mesh` only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mesh import build, control_plane
from tests.mesh.control_plane import ControlPlane
from tests.mesh.objects import manifest
from tests.mesh.places import Process
from tests.mesh.run import RUNNING
from tests.mesh.workloads import Workloads

collect_ignore_glob = [] if RUNNING in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def plane() -> Iterator[ControlPlane]:
    """etcd, the API server and istiod."""
    with control_plane.running(build.built(), Path(os.environ[RUNNING])) as plane:
        yield plane


@pytest.fixture(scope="session")
def mesh(plane: ControlPlane) -> Workloads:
    """The front end, hgate, an app that takes HBONE, and two clients with their sidecars; the services are
    declared."""
    workloads = Workloads(plane)
    workloads.cloudrun()
    workloads.gateway()
    workloads.ambient_app()
    plane.objects.apply(manifest("hello"))
    plane.objects.apply(manifest("ambient"))
    # The second one reaches istiod through the gateway.
    for name, istiod_port in (("web", 15012), ("guest", 15443)):
        sidecar = workloads.sidecar(name, name, "clients", {"app": name}, istiod_port=istiod_port)
        workloads.sidecar_ready(sidecar, name)
    return workloads


@pytest.fixture(scope="module", params=["pilot-agent", "builtin", "envoy"])
def end(mesh: Workloads, request: pytest.FixtureRequest) -> Iterator[str]:
    """Each kind of mTLS end before the app, by its name. A module's `APP` names another app, for which its
    `PROTOCOL` is what Envoy under pilot-agent is told that it speaks; its `ENVIRON` is for krun."""
    kind: str = request.param
    app = getattr(request.module, "APP", "tests.mesh.app")
    objects = manifest("hello")
    for each in objects:
        if each["kind"] == "Sidecar":
            each["spec"]["ingress"][0]["port"]["protocol"] = getattr(request.module, "PROTOCOL", "HTTP")
    mesh.plane.objects.apply(objects)
    started: list[Process] = []
    try:
        krun = mesh.krun(kind, getattr(request.module, "ENVIRON", None), app)
        started.append(krun)
        mesh.krun_ready(krun)
        yield kind
    finally:
        for process in reversed(started):
            process.end()

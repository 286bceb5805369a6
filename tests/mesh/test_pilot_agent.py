"""pilot-agent as krun's mTLS end: when it is ready, when it dies, when it has nothing to say, and its end."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shared.errors import EXIT_UNAVAILABLE
from tests.mesh.objects import manifest
from tests.mesh.places import Process, namespace, run_in, until
from tests.mesh.workloads import Workloads, ask

PATIENCE_S = 30.0

ENDS_S = 10.0
"""Cloud Run's, from SIGTERM to SIGKILL."""


@pytest.fixture
def krun(mesh: Workloads) -> Iterator[Process]:
    mesh.plane.objects.apply(manifest("hello"))
    krun = mesh.krun("pilot-agent")
    mesh.krun_ready(krun)
    yield krun
    krun.end()


def processes(name: str) -> list[int]:
    """Those of the container that run this program."""
    found = []
    for pid in run_in("app", "ip", "netns", "pids", namespace("app")).stdout.split():
        with suppress(FileNotFoundError):  # it has ended since
            if Path(os.readlink(f"/proc/{pid}/exe")).name == name:
                found.append(int(pid))
    return found


def test_tunnels_are_taken_once_envoy_is_ready(krun: Process) -> None:
    """Else the first requests of a new instance would find nobody at 15003."""
    said = until(lambda: krun.said if "tunnels on" in krun.said else None, PATIENCE_S, "it takes tunnels")
    assert 0 <= said.find("mTLS end: pilot-agent") < said.find("tunnels on")
    assert ask("web").status == 200


def test_neither_is_root(krun: Process) -> None:
    for name in ("pilot-agent", "envoy"):
        (pid,) = processes(name)
        assert Path(f"/proc/{pid}").stat().st_uid == 1337


@pytest.mark.parametrize("victim", ["pilot-agent", "envoy"])
def test_what_dies_is_started_again(krun: Process, victim: str) -> None:
    (pid,) = processes(victim)
    os.kill(pid, signal.SIGKILL)
    until(lambda: True if processes(victim) not in ([], [pid]) else None, PATIENCE_S, f"another {victim}")
    until(lambda: True if ask("web").status == 200 else None, PATIENCE_S, "an answer")
    assert len(processes("envoy")) == 1
    assert "pilot-agent has ended" in krun.said


def test_all_end_with_krun(krun: Process) -> None:
    os.kill(krun.started.pid, signal.SIGTERM)
    assert krun.started.wait(ENDS_S) == 128 + signal.SIGTERM or krun.started.returncode == 0
    assert (processes("pilot-agent"), processes("envoy")) == ([], [])


def test_a_revision_of_cloud_run_s_is_known_to_the_mesh(mesh: Workloads) -> None:
    mesh.plane.objects.apply(manifest("hello"))
    krun = mesh.krun("pilot-agent", {"K_SERVICE": "hello", "K_REVISION": "hello-00007-abc"})
    try:
        mesh.krun_ready(krun)
        node = json.loads(run_in("app", "curl", "-sS", "http://127.0.0.1:15000/server_info").stdout)["node"]
        labels = {"app": "hello", "service.istio.io/canonical-revision": "hello-00007-abc"}
        assert labels.items() <= node["metadata"]["LABELS"].items()
        assert re.fullmatch(r"sidecar~10\.77\.0\.3~hello-00007-abc-[0-9a-f]{8}\.demo~.*", node["id"])
        assert ask("web").status == 200
    finally:
        krun.end()


@pytest.mark.parametrize("victim", ["pilot-agent", "envoy"])
def test_all_end_with_krun_whoever_hangs(krun: Process, victim: str) -> None:
    (pid,) = processes(victim)
    os.kill(pid, signal.SIGSTOP)
    os.kill(krun.started.pid, signal.SIGTERM)
    assert krun.started.wait(ENDS_S) in (0, 128 + signal.SIGTERM)
    assert (processes("pilot-agent"), processes("envoy")) == ([], [])


def test_an_istiod_that_is_not_there(mesh: Workloads) -> None:
    krun = mesh.krun("pilot-agent", {"XDS_ADDR": "istiod.istio-system.svc:9"})
    assert krun.started.wait(PATIENCE_S) == EXIT_UNAVAILABLE
    last = krun.said.strip().splitlines()[-1]
    assert last.startswith("krun: pilot-agent is not ready after 20 s")
    assert "connection refused" in last
    assert (processes("pilot-agent"), processes("envoy")) == ([], [])


def test_without_a_sidecar_resource_krun_says_so(mesh: Workloads) -> None:
    """Envoy then listens on each Service's port, and may not on 443, which every cluster has."""
    sidecars = [each for each in manifest("hello") if each["kind"] == "Sidecar"]
    mesh.plane.objects.apply(sidecars)
    mesh.plane.objects.delete(sidecars)
    try:
        krun = mesh.krun("pilot-agent", {"HBONE_CAPTURE": "none"})
        assert krun.started.wait(PATIENCE_S) == EXIT_UNAVAILABLE
        last = krun.said.strip().splitlines()[-1]
        assert "cannot bind '127.0.0.1:443'" in last
        assert "is there a Sidecar in namespace demo for workloads with the label app=hello" in last
    finally:
        mesh.plane.objects.apply(sidecars)


def test_without_it_and_with_captured_traffic_krun_says_so_too(mesh: Workloads) -> None:
    sidecars = [each for each in manifest("hello") if each["kind"] == "Sidecar"]
    mesh.plane.objects.apply(sidecars)
    mesh.plane.objects.delete(sidecars)
    krun = mesh.krun("pilot-agent")
    try:
        told = "istiod has sent Envoy no listener for port 15003: a Sidecar in namespace demo has to have"
        until(lambda: True if told in krun.said else None, PATIENCE_S, told)
    finally:
        krun.end()
        mesh.plane.objects.apply(sidecars)

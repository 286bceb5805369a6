"""What the app connects to, by Envoy under pilot-agent: captured by istio-iptables, or by HTTP_PROXY."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.control_plane import answers
from tests.mesh.objects import Object, manifest
from tests.mesh.places import BRIDGE, PLACES, Process, namespace, run_in, until
from tests.mesh.workloads import SERVICE, Workloads

PATIENCE_S = 30.0

EGRESS: list[Object] = [{"hosts": ["*/*"]}]
"""As docs/service.md has it."""


@pytest.fixture(scope="module", autouse=True)
def declared(mesh: Workloads) -> Iterator[None]:
    objects: list[Any] = [*manifest("hello"), *manifest("outbound")]
    for each in objects:
        if each["kind"] == "Sidecar":
            each["spec"]["egress"] = EGRESS
    mesh.plane.objects.apply(objects)
    environ: dict[str, object] = {"PYTHONPATH": os.getcwd(), "HOST": PLACES[BRIDGE], "PORT": 18090}
    command = [sys.executable, "-m", "tests.mesh.app"]
    plain = mesh.plane.processes.start("plain", BRIDGE, command, environ)
    mesh.plane.processes.ready(plain, lambda: answers(f"http://{PLACES[BRIDGE]}:18090/"), PATIENCE_S)
    yield
    plain.end()
    mesh.plane.objects.delete(manifest("outbound"))
    mesh.plane.objects.apply(manifest("hello"))


def asked(url: str, *options: str) -> dict[str, Any]:
    """What the service has seen of a request from the container; empty if there was no answer."""
    ran = run_in("app", "curl", "-sS", "-m", "10", *options, url)
    if not ran.stdout.startswith("{"):
        print(url, ran.stdout, ran.stderr)
        return {}
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


def rules(table: str = "nat") -> list[str]:
    """Those of either interface of the kernel: pilot-agent chooses one."""
    found = []
    for program in ("iptables-nft", "iptables-legacy"):
        listed = run_in("app", program, "-t", table, "-S").stdout.splitlines()
        found += [line for line in listed if not line.startswith("-P")]
    return found


def environments() -> list[str]:
    """Of the container's processes."""
    found = []
    for pid in run_in("app", "ip", "netns", "pids", namespace("app")).stdout.split():
        with suppress(OSError):  # it has ended since
            found.append(Path(f"/proc/{pid}/environ").read_text())
    return found


@pytest.fixture(scope="module")
def capturing(mesh: Workloads) -> Iterator[Process]:
    krun = mesh.krun("pilot-agent", {"HBONE_CAPTURE": "iptables", "ISTIO_META_DNS_CAPTURE": "true"})
    try:
        mesh.krun_ready(krun)
        yield krun
    finally:
        krun.end()


def test_connections_are_captured_by_pilot_agent_s_rules(capturing: Process) -> None:
    assert "outbound traffic: iptables (10.0.0.0/8, by pilot-agent)" in capturing.said
    assert any("ISTIO_REDIRECT" in line for line in rules())
    told = until(lambda: asked("http://10.99.1.1:8090/there") or None, PATIENCE_S, "an answer")
    assert told["path"] == "/there"
    assert "x-request-id" in told["headers"], "Envoy's"


def test_names_that_only_the_mesh_knows(capturing: Process) -> None:
    """Asked of a name server that is not there, answered by pilot-agent."""
    url = "http://plain.demo.svc.cluster.local:8090/by-name"
    told = until(lambda: asked(url) or None, PATIENCE_S, "an answer")
    assert told["path"] == "/by-name"


def test_a_service_of_the_mesh_gets_our_certificate(capturing: Process, mesh: Workloads) -> None:
    """Out by Envoy, and in again by gateway, front end and krun."""
    there = mesh.plane.objects.get("/api/v1/namespaces/demo/services/hello")
    assert there is not None
    url = f"http://{there['spec']['clusterIP']}:8080/round"
    told = until(lambda: asked(url, "-H", f"Host: {SERVICE}:8080") or None, PATIENCE_S, "an answer")
    assert told["path"] == "/round"
    assert "URI=spiffe://cluster.local/ns/demo/sa/hello" in told["headers"]["x-forwarded-client-cert"]


def test_they_are_removed_at_the_end(capturing: Process) -> None:
    os.kill(capturing.started.pid, signal.SIGTERM)
    capturing.started.wait(PATIENCE_S)
    assert (rules(), rules("raw")) == ([], [])


def test_by_proxy(mesh: Workloads) -> None:
    krun = mesh.krun("pilot-agent", {"HBONE_CAPTURE": "proxy"})
    try:
        mesh.krun_ready(krun)
        (the_app_s,) = [told for told in environments() if "HTTP_PROXY=" in told]
        assert "http_proxy=http://127.0.0.1:15007\0" in the_app_s
        proxy = ("-x", "http://127.0.0.1:15007")
        url = "http://plain.demo.svc.cluster.local/there"
        told = until(lambda: asked(url, *proxy) or None, PATIENCE_S, "an answer")
        assert told["path"] == "/there"
        url = "http://round.demo.svc.cluster.local/round"
        told = until(lambda: asked(url, *proxy) or None, PATIENCE_S, "an answer")
        assert "URI=spiffe://cluster.local/ns/demo/sa/hello" in told["headers"]["x-forwarded-client-cert"]
        assert rules() == []
    finally:
        krun.end()

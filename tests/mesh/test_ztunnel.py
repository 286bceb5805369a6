"""A real ztunnel as the client: from its SOCKS port by double HBONE to an app on Cloud Run, with istiod's
configuration and certificates everywhere.

ztunnel's source is on GitHub only, so CI cannot build it. ZTUNNEL names a binary (CONTRIBUTING.md says
how to make one); without it these tests are left out.
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.ambient import SECURE_PORT, TOLD, multi_network, told
from tests.mesh.control_plane import answers
from tests.mesh.places import BRIDGE, PLACES, Process, run_in, until
from tests.mesh.registered import HOST
from tests.mesh.workloads import SCRIPTS, START_S, Workloads, run_client

ZTUNNEL = os.environ.get("ZTUNNEL", "")

pytestmark = pytest.mark.skipif(not ZTUNNEL, reason="ZTUNNEL names no ztunnel")

PORT = 8080

GATEWAY_PORT = 15018

GATEWAY_FILE = f"""
listen: ["{PLACES[BRIDGE]}:17442"]
admin: "127.0.0.1:17000"
metrics: "127.0.0.1:17020"
health: "127.0.0.1:17021"
routes:
  - host: "*.demo.svc.cluster.local"
    tunnel: "https://hello.a.run.app/_hbone/15008"
    connect: "127.0.0.1:8449"
    ca: "{{ca}}"
    inner: hbone
hbone:
  listen: ["{PLACES[BRIDGE]}:{GATEWAY_PORT}"]
  certificates: "{{certificates}}"
  rules:
    - from: ["spiffe://cluster.local/ns/clients/sa/*"]
      to: ["{HOST}:{PORT}"]
"""

ACCOUNT = {
    "apiVersion": "v1",
    "kind": "ServiceAccount",
    "metadata": {"name": "hgate", "namespace": "istio-system"},
}

CROWD = 500
STREAMS = 100
"""Tunnels at once, and what one outer connection carries of them (POOL_MAX_STREAMS_PER_CONNECTION)."""

LINE_S = 10.0
"""For a line of a log."""


def member(namespace: str, account: str, place: str) -> dict[str, Any]:
    """The ztunnel's own workload, as istiod has to know it."""
    return {
        "apiVersion": "networking.istio.io/v1",
        "kind": "WorkloadEntry",
        "metadata": {"name": f"member-{account}", "namespace": namespace},
        "spec": {"address": PLACES[place], "network": "local", "serviceAccount": account},
    }


@pytest.fixture(scope="module")
def gateway(mesh: Workloads) -> Iterator[Process]:
    """An hgate with the account that the Gateway's annotation names."""
    plane = mesh.plane
    plane.objects.apply([ACCOUNT])
    certificates = plane.folder / "hgate-ztunnel"
    ports = ("--listen", "127.0.0.1:8449", "--metadata", "127.0.0.1:8450")
    front_end = mesh.front_end("crowded", *ports, "--concurrency", "1000")
    plane.certify("istio-system", "hgate", certificates)
    path = plane.folder / "hgate-ztunnel.yaml"
    path.write_text(GATEWAY_FILE.format(ca=front_end / "ca.pem", certificates=certificates))
    command = [SCRIPTS / "hgate", "--config", path]
    process = plane.processes.start("hgate-ztunnel", BRIDGE, command, {"GCE_METADATA_HOST": "127.0.0.1:8450"})
    try:
        plane.processes.ready(process, lambda: answers("http://127.0.0.1:17021/healthz/ready"), START_S)
        yield process
    finally:
        process.end()


@pytest.fixture(scope="module")
def krun(mesh: Workloads) -> Iterator[Process]:
    environ = {"HBONE_INNER_HOSTS": HOST, "HBONE_ALLOW": "ns/clients/sa/web"}
    process = mesh.krun("builtin", environ, "tests.mesh.tcp_app")
    try:
        mesh.krun_ready(process)
        yield process
    finally:
        process.end()


@pytest.fixture(scope="module")
def vip(mesh: Workloads, gateway: Process, krun: Process) -> Iterator[str]:
    """The service's address, which istiod gives to ztunnels."""
    with (
        multi_network(mesh.plane, GATEWAY_PORT),
        told(mesh.plane, TOLD, "--ambient-network", "cloud"),
    ):
        service = mesh.plane.objects.get("/api/v1/namespaces/demo/services/registered")
        assert service is not None
        yield service["spec"]["clusterIP"]


@contextmanager
def ztunnel(mesh: Workloads, namespace: str, account: str, place: str) -> Iterator[Process]:
    """One that is a single workload's, in a place of its own, with a SOCKS port."""
    plane = mesh.plane
    own = plane.folder / f"ztunnel-{account}"
    own.mkdir(exist_ok=True)
    (own / "root.pem").write_text(plane.root)
    (own / "token").write_text(plane.objects.token(namespace, account, "istio-ca"))
    workload = member(namespace, account, place)
    plane.objects.apply([workload])
    istiod = f"https://istiod.istio-system.svc:{SECURE_PORT}"
    environ: dict[str, object] = {
        "PROXY_MODE": "dedicated",
        "PROXY_WORKLOAD_INFO": f"{namespace}/member-{account}/{account}",
        "UNSTABLE_ENABLE_SOCKS5": "true",
        "ENABLE_ORIG_SRC": "false",
        "NETWORK": "local",
        "CLUSTER_ID": "Kubernetes",
        "XDS_ADDRESS": istiod,
        "CA_ADDRESS": istiod,
        "XDS_ROOT_CA": own / "root.pem",
        "CA_ROOT_CA": own / "root.pem",
        "AUTH_TOKEN": own / "token",
        "INSTANCE_IP": PLACES[place],
        "POD_NAME": f"member-{account}",
        "POD_NAMESPACE": namespace,
        "SERVICE_ACCOUNT": account,
        "RUST_LOG": "info",
    }
    command = [ZTUNNEL, "proxy", "ztunnel"]
    process = plane.processes.start(f"ztunnel-{account}", place, command, environ, cwd=own)
    try:
        asked = ["curl", "-sf", "-o", "/dev/null", "http://127.0.0.1:15021/healthz/ready"]
        plane.processes.ready(process, lambda: run_in(place, *asked).returncode == 0, START_S)
        dump = ["curl", "-sf", "http://127.0.0.1:15000/config_dump"]
        until(lambda: HOST in run_in(place, *dump).stdout or None, START_S, "its service")
        yield process
    finally:
        process.end()
        plane.objects.delete([workload])


@pytest.fixture(scope="module")
def client(mesh: Workloads, vip: str) -> Iterator[Process]:
    """The ztunnel of a workload whom everybody lets in."""
    with ztunnel(mesh, "clients", "web", "node") as process:
        yield process


def told_by(vip: str, case: str, place: str = "node") -> dict[str, Any]:
    """What a client behind the ztunnel found."""
    found: dict[str, Any] = json.loads(run_client(place, "tests.mesh.socks_client", vip, PORT, case))
    print(f"{case}: {found}")
    return found


def cpu_s(process: Process) -> float:
    """What a process has used since its start."""
    fields = Path(f"/proc/{process.started.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("case", ["answer", "download", "upload", "both", "crowd", "turns", "slow", "reset"])
def test_a_client_behind_it(case: str, client: Process, gateway: Process, krun: Process, vip: str) -> None:
    before = [cpu_s(each) for each in (client, gateway, krun)]
    found = told_by(vip, case)
    spent = [round(cpu_s(each) - was, 2) for each, was in zip((client, gateway, krun), before, strict=True)]
    print(f"  CPU: ztunnel {spent[0]} s, hgate {spent[1]} s, krun {spent[2]} s")
    assert found.get("first", "ready\n") == "ready\n"


def test_its_connections_to_the_gateway_are_kept(client: Process, gateway: Process, vip: str) -> None:
    """One outer connection carries tunnel after tunnel."""
    assert told_by(vip, "turns")["median_ms"] < 1000
    with urllib.request.urlopen("http://127.0.0.1:17020/metrics", timeout=10) as answer:
        metrics = answer.read().decode()
    (connections,) = re.findall(r"^hbone_listener_connections_open (\d+)", metrics, re.M)
    assert 1 <= int(connections) <= CROWD / STREAMS + 1


def test_an_account_that_the_gateway_denies(mesh: Workloads, gateway: Process, vip: str) -> None:
    with ztunnel(mesh, "demo", "hello", "other-node"):
        assert told_by(vip, "answer", "other-node")["first"] == ""
    line = "spiffe://cluster.local/ns/demo/sa/hello"
    until(lambda: (line in gateway.said and "401" in gateway.said) or None, LINE_S, "the gateway's refusal")


def test_an_account_that_krun_denies(mesh: Workloads, krun: Process, vip: str) -> None:
    with ztunnel(mesh, "clients", "guest", "other-node"):
        assert told_by(vip, "answer", "other-node")["first"] == ""
    line = "spiffe://cluster.local/ns/clients/sa/guest"
    until(lambda: (line in krun.said) or None, LINE_S, "krun's refusal")

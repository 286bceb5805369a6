"""gRPC that asks istiod itself, by the bootstrap file that krun makes: as a client, and as a server."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import EXIT_UNAVAILABLE, EXIT_USAGE
from tests.kube import run as kube
from tests.mesh.control_plane import ControlPlane
from tests.mesh.objects import manifest
from tests.mesh.places import PLACES, Process, until
from tests.mesh.workloads import ISTIOD, Workloads, run_client

PATIENCE_S = 60.0

EFFECT_S = 30.0
"""For what istiod has been told to reach a client that is started anew for each look."""

ON = {"HBONE_GRPC": "on", "XDS_ADDR": ISTIOD, "GRPC_DNS_RESOLVER": "native"}
"""gRPC's own resolver asks a name server for what is in /etc/hosts, too, and there is none here."""

ECHO = "echo.demo.svc.cluster.local:7070"

HELLO, WEB = "spiffe://cluster.local/ns/demo/sa/hello", "spiffe://cluster.local/ns/clients/sa/web"


@pytest.fixture(scope="module")
def workloads(plane: ControlPlane) -> Workloads:
    return Workloads(plane)


@pytest.fixture(scope="module")
def echo(workloads: Workloads) -> Iterator[Process]:
    """A server with mTLS, started by a krun of its own; its clients come straight to it."""
    workloads.plane.objects.apply(manifest("echo"))
    server = workloads.krun(
        "none",
        {
            **ON,
            "WORKLOAD_NAME": "echo",
            "WORKLOAD_SERVICE_ACCOUNT": "echo",
            "KUBECONFIG": workloads.plane.kubeconfig(kube.ADMIN, "echo"),
            "HBONE_APP": f"{PLACES['echo']}:9000",
            "HOST": PLACES["echo"],
        },
        app="tests.mesh.proxyless_app",
        name="echo",
        place="echo",
    )
    workloads.krun_ready(server, "echo")
    yield server
    server.end()


def client(workloads: Workloads, **environ: object) -> tuple[int, str]:
    """krun's exit code, and what it and its app have said, a client of the service `ECHO`."""
    # Not hello, whose Sidecar leaves it no service of the mesh to see.
    told = {**ON, "SERVICE": ECHO, "HBONE_STARTUP_PROBE": "-", "WORKLOAD_NAME": "caller"}
    krun = workloads.krun("none", {**told, **environ}, app="tests.mesh.proxyless_client")
    return krun.started.wait(PATIENCE_S), krun.said


def test_a_service_by_its_name_with_mtls(echo: Process, workloads: Workloads) -> None:
    code, said = client(workloads)
    assert code == 0, said
    assert "Unary HELLO" in said
    assert f"Caller {HELLO}" in said


def test_the_file_is_where_the_variable_says_while_the_app_runs(
    echo: Process, workloads: Workloads, tmp_path: Path
) -> None:
    """The variable is enough, and what is there already is somebody else's."""
    path = tmp_path / "proxy" / "bootstrap.json"
    told = {"GRPC_XDS_BOOTSTRAP": path, "HBONE_STARTUP_PROBE": "-", "XDS_ADDR": ISTIOD}
    krun = workloads.krun("none", told)
    workloads.krun_ready(krun)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert '"GENERATOR": "grpc"' in path.read_text()
    krun.end()
    assert not path.exists()
    path.write_text("{}")
    code, said = client(workloads, GRPC_XDS_BOOTSTRAP=path, HBONE_GRPC="auto")
    assert (code, "gRPC's bootstrap file" in said) == (1, False)
    assert path.read_text() == "{}"
    code, said = client(workloads, GRPC_XDS_BOOTSTRAP=path)
    assert (code, f"Caller {HELLO}" in said) == (0, True), said


def test_istiod_s_port_without_tls(echo: Process, workloads: Workloads) -> None:
    """What it says of the server's mTLS counts all the same."""
    told = {"XDS_ADDR": workloads.plane.plaintext_xds, "HBONE_GRPC": "plaintext"}
    code, said = client(workloads, **told)
    assert (code, f"Caller {HELLO}" in said) == (0, True), said


def test_a_policy_is_the_server_s_to_enforce(echo: Process, workloads: Workloads) -> None:
    def says(text: str) -> bool | None:
        return True if text in client(workloads)[1] else None

    workloads.plane.objects.apply(manifest("deny-echo"))
    until(lambda: says("PERMISSION_DENIED"), EFFECT_S, "hello is refused")
    workloads.plane.objects.delete(manifest("deny-echo"))
    until(lambda: says(f"Caller {HELLO}"), EFFECT_S, "hello is let in again")


def test_without_mtls_in_the_mesh(echo: Process, workloads: Workloads) -> None:
    objects = workloads.plane.objects
    off = manifest("echo")
    for each in off:
        if each["kind"] == "PeerAuthentication":
            each["spec"]["mtls"]["mode"] = "DISABLE"
        elif each["kind"] == "DestinationRule":
            each["spec"]["trafficPolicy"]["tls"]["mode"] = "DISABLE"
    objects.apply(off)
    try:
        until(
            lambda: True if "Caller nobody" in client(workloads)[1] else None,
            EFFECT_S,
            "a caller without a certificate",
        )
    finally:
        objects.apply(manifest("echo"))


def test_a_sidecar_resource_counts_for_grpc_too(echo: Process, workloads: Workloads) -> None:
    workloads.plane.objects.apply(manifest("hello"))

    def hidden() -> bool | None:
        said = client(workloads, WORKLOAD_NAME="hello")[1]
        return True if f"LDS resource {ECHO}: does not exist" in said else None

    until(hidden, EFFECT_S, "no service is to be seen")


def test_istiod_through_the_gateway(echo: Process, mesh: Workloads) -> None:
    """By a `forward:` route, for a container that reaches nothing else of the cluster."""
    code, said = client(mesh, XDS_ADDR="istiod.istio-system.svc:15443")
    assert (code, f"Caller {HELLO}" in said) == (0, True), said


def test_a_sidecar_s_call_ends_in_a_server_behind_krun(mesh: Workloads) -> None:
    """Tunnels lead to the app's own port, which has the mesh's mTLS; no Envoy is in the container."""
    inbound = manifest("proxyless")
    mesh.plane.objects.apply([*manifest("hello"), *inbound])
    told = {**ON, "WORKLOAD_NAME": "hello", "HBONE_INBOUND_LISTEN": "127.0.0.1:8080"}
    krun = mesh.krun("none", told, app="tests.mesh.proxyless_app")
    try:
        mesh.krun_ready(krun)
        methods = ("Unary", "Stream", "Caller")
        said = run_client("web", "tests.mesh.grpc_client", *methods).splitlines()
        assert said == ["HELLO", "[3, 3, 100000]", WEB]
    finally:
        krun.end()
        mesh.plane.objects.delete(inbound)


@pytest.mark.parametrize(
    ("environ", "code", "text"),
    [
        ({"XDS_ADDR": ""}, EXIT_USAGE, "neither XDS_ADDR nor MESH=td: is set: where is the control plane"),
        ({"XDS_ADDR": "10.77.0.1:15012"}, EXIT_USAGE, "has to be a name in it, such as istiod"),
        ({"HBONE_CA": ""}, EXIT_UNAVAILABLE, "no certificates in .*: set HBONE_CERTS, or HBONE_CA=istio"),
    ],
)
def test_what_is_missing_is_said_before_the_app_starts(
    workloads: Workloads, environ: dict[str, object], code: int, text: str
) -> None:
    ended, said = client(workloads, **environ)
    last = said.strip().splitlines()[-1]
    assert (ended, bool(re.search(text, last))) == (code, True), said

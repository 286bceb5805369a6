"""hgate with `hgate cluster`, in a real Istio: an annotated Service is all that somebody has to write."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest

from shared.cluster.service_annotations import STATUS, WORKLOAD_ACCOUNT
from shared.cluster.service_annotations import URL as URL_KEY
from shared.errors import EXIT_DENIED, EXIT_OK
from tests.kube import run as kube
from tests.mesh.control_plane import answers
from tests.mesh.objects import Object
from tests.mesh.places import BRIDGE, PLACES, namespace, run_in, until
from tests.mesh.workloads import SCRIPTS, Answer, Workloads, ask

HOST = "clustered.demo.svc.cluster.local"
GATEWAY = f"{PLACES[BRIDGE]}:16442"
FRONT_END = f"{PLACES[BRIDGE]}:8447"
URL = "https://hello.a.run.app:8447"
PATH = "/api/v1/namespaces/demo/services/clustered"
EFFECT_S = 15.0
"""For what istiod has been told to reach a sidecar."""

FILE = """
listen: ["{gateway}"]
admin: "127.0.0.1:16000"
metrics: "127.0.0.1:16020"
health: "127.0.0.1:16021"
routes: []
cluster:
  folder: "{folder}"
  ops: "127.0.0.1:16023"
  gateway: ["{gateway}"]
  mesh_env: false
  allow:
    - {{namespace: demo, hosts: ["hello.a.run.app:8447"], ca: "{ca}", services: [back]}}
"""

SERVICE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {
        "name": "clustered",
        "namespace": "demo",
        "annotations": {URL_KEY: URL, WORKLOAD_ACCOUNT: "hello"},
    },
    "spec": {"ports": [{"name": "http", "port": 8080}]},
}

BACK: list[dict[str, Any]] = [
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "back", "namespace": "demo"},
        "spec": {"ports": [{"name": "http", "port": 8080}]},
    },
    {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "back-1",
            "namespace": "demo",
            "labels": {"kubernetes.io/service-name": "back"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 15006}],
        "endpoints": [{"addresses": [PLACES["echo"]]}],
    },
    {
        "apiVersion": "networking.istio.io/v1",
        "kind": "Sidecar",
        "metadata": {"name": "back", "namespace": "demo"},
        "spec": {
            "workloadSelector": {"labels": {"app": "back"}},
            "egress": [{"hosts": ["~/*"]}],
            "ingress": [
                {
                    "port": {"number": 15006, "protocol": "HTTP", "name": "http"},
                    "bind": PLACES["echo"],
                    "defaultEndpoint": "127.0.0.1:9000",
                    "captureMode": "NONE",
                }
            ],
        },
    },
    {
        "apiVersion": "security.istio.io/v1",
        "kind": "PeerAuthentication",
        "metadata": {"name": "back", "namespace": "demo"},
        "spec": {"selector": {"matchLabels": {"app": "back"}}, "mtls": {"mode": "STRICT"}},
    },
]


@pytest.fixture(scope="module", autouse=True)
def gateway(mesh: Workloads) -> Iterator[None]:
    """A second hgate, whose file has no route, with its process at the API server and a front end."""
    folder = mesh.folder / "clustered"
    folder.mkdir()
    processes = mesh.plane.processes
    front_end = mesh.folder / "clustered-front-end"
    front_end.mkdir()
    words = ("--audience", "https://hello.a.run.app", "--keys", "http://127.0.0.1:8444/oauth2/v3/certs")
    command = [SCRIPTS / "hbone", "cloudrun", "--listen", FRONT_END, "--metadata", "127.0.0.1:8448", *words]
    container = ("--container", f"{PLACES['app']}:15009", "--dir", front_end, "--log-format", "text")
    started = [processes.start("clustered-front-end", BRIDGE, [*command, *container])]
    processes.ready(started[0], lambda: "GCE_METADATA_HOST" in started[0].said, EFFECT_S)
    file = mesh.folder / "clustered.yaml"
    file.write_text(FILE.format(gateway=GATEWAY, folder=folder, ca=front_end / "ca.pem"))
    cluster = {
        "KUBECONFIG": mesh.plane.kubeconfig(kube.ADMIN, "hgate-cluster"),
        "POD_NAMESPACE": "istio-system",
    }
    started.append(
        processes.start("hgate-cluster", BRIDGE, [SCRIPTS / "hgate", "cluster", "--config", file], cluster)
    )
    environ = {"GCE_METADATA_HOST": "127.0.0.1:8444"}
    started.append(processes.start("clustered-hgate", BRIDGE, [SCRIPTS / "hgate", "--config", file], environ))
    ready = "http://127.0.0.1:16021/healthz/ready"
    processes.ready(started[-1], lambda: answers(ready), EFFECT_S)
    until(lambda: "we write from now on" in started[1].said or None, EFFECT_S, "it writes")
    yield
    for process in reversed(started):
        process.end()


@contextmanager
def outside(certificates: Path, name: str) -> Iterator[TextIO]:
    """A client with one connection: a line that is written to it is a request, a line that is read an
    answer."""
    command = ["-m", "tests.mesh.outside_client", GATEWAY, str(certificates), name]
    near, far = socket.socketpair()
    with near, near.makefile("rw", buffering=1) as talk:
        process = subprocess.Popen(
            ["ip", "netns", "exec", namespace("guest"), sys.executable, *command],
            stdin=far.fileno(),
            stdout=far.fileno(),
            env={"PYTHONPATH": os.getcwd(), "PATH": os.environ["PATH"]},
        )
        far.close()
        near.settimeout(EFFECT_S)
        try:
            yield talk
        finally:
            process.kill()
            process.wait()


def answered(status: int) -> Answer:
    def once() -> Answer | None:
        answer = ask("web", "/clustered", service=HOST)
        return answer if answer.status == status else None

    return until(once, EFFECT_S, f"{HOST} answers {status}")


def routes() -> list[str]:
    told = run_in(BRIDGE, "curl", "-s", "http://127.0.0.1:16000/config").stdout
    return [route["host"] for route in json.loads(told)["routes"]]


def test_an_annotated_service_is_all_it_takes(mesh: Workloads) -> None:
    objects = mesh.plane.objects
    krun = mesh.krun("pilot-agent", {"WORKLOAD_NAME": "clustered"})
    try:
        objects.apply([SERVICE])
        began = time.monotonic()
        until(lambda: HOST in routes() or None, EFFECT_S, "it is a route")
        assert time.monotonic() - began < 2
        mesh.krun_ready(krun)  # its Sidecar has come
        assert answered(200).headers["host"].startswith(HOST)
        told = (objects.get(PATH) or {})["metadata"]["annotations"][STATUS]
        assert told == f"routed to {URL}/_hbone/15003"

        # What somebody removes is made again.
        entry = {
            "kind": "ServiceEntry",
            "apiVersion": "networking.istio.io/v1",
            "metadata": {"name": "hbone-clustered", "namespace": "demo"},
        }
        objects.delete([entry])
        path = "/apis/networking.istio.io/v1/namespaces/demo/serviceentries/hbone-clustered"
        until(lambda: objects.get(path), EFFECT_S, "it is there again")
        answered(200)

        # Without the Service nothing of ours stays.
        objects.delete([SERVICE])
        until(lambda: HOST not in routes() or None, EFFECT_S, "it is no route")
        gone = ("serviceentries", "destinationrules", "workloadentries", "sidecars")
        for plural in gone:
            of_kind = f"/apis/networking.istio.io/v1/namespaces/demo/{plural}"

            def none_of_ours(path: str = of_kind) -> bool | None:
                names = [each["metadata"]["name"] for each in (objects.get(path) or {})["items"]]
                return None if any(name.startswith("hbone-clustered") for name in names) else True

            until(none_of_ours, EFFECT_S, f"no {plural} of ours")
    finally:
        krun.end()


def test_removal_stops_new_tunnels_and_leaves_open_ones(mesh: Workloads) -> None:
    objects, certificates = mesh.plane.objects, mesh.folder / "staying"
    mesh.plane.certify("clients", "guest", certificates)
    krun = mesh.krun("builtin", {"WORKLOAD_NAME": "clustered"})
    try:
        objects.apply([SERVICE])
        mesh.krun_ready(krun)
        until(lambda: HOST in routes() or None, EFFECT_S, "it is a route")
        with outside(certificates, f"outbound_.8080_._.{HOST}") as staying:
            assert json.loads(staying.readline())["path"] == "/from-outside"
            objects.delete([SERVICE])
            until(lambda: HOST not in routes() or None, EFFECT_S, "it is no route")
            with outside(certificates, f"outbound_.8080_._.{HOST}") as refused:
                assert refused.readline() == ""
            staying.write("again\n")
            assert json.loads(staying.readline())["path"] == "/from-outside"
    finally:
        krun.end()


def test_a_service_entry_is_a_route_for_its_own_namespace_only(mesh: Workloads) -> None:
    objects = mesh.plane.objects
    host, theirs = "entry.demo.svc.cluster.local", "entry.clients.svc.cluster.local"
    entry: dict[str, Any] = {
        "apiVersion": "networking.istio.io/v1",
        "kind": "ServiceEntry",
        "metadata": {"name": "entry", "namespace": "demo", "annotations": {URL_KEY: URL}},
        "spec": {"hosts": [host], "ports": [{"number": 80, "name": "http"}], "resolution": "NONE"},
    }
    path = "/apis/networking.istio.io/v1/namespaces/demo/serviceentries/entry"

    def told(start: str) -> str | None:
        annotations = (objects.get(path) or {})["metadata"]["annotations"]
        status: str = annotations.get(STATUS, "")
        return status if status.startswith(start) else None

    objects.apply([entry])
    try:
        until(lambda: told("routed to "), EFFECT_S, "it is told")
        until(lambda: host in routes() or None, EFFECT_S, "it is a route")
        objects.apply([{**entry, "spec": {**entry["spec"], "hosts": [theirs]}}])
        assert f"host {theirs} is no SERVICE.demo" in until(lambda: told("refused: "), EFFECT_S, "it is told")
        until(lambda: True if not {host, theirs} & set(routes()) else None, EFFECT_S, "it is no route")
    finally:
        objects.delete([entry])


def test_what_is_somebody_else_s_is_left_and_named(mesh: Workloads) -> None:
    objects = mesh.plane.objects
    theirs: Object = {
        "apiVersion": "networking.istio.io/v1",
        "kind": "DestinationRule",
        "metadata": {"name": "hbone-clustered", "namespace": "demo"},
        "spec": {"host": HOST, "trafficPolicy": {"tls": {"mode": "DISABLE"}}},
    }
    objects.apply([theirs, SERVICE])
    try:

        def told() -> str | None:
            status = (objects.get(PATH) or {})["metadata"]["annotations"].get(STATUS, "")
            return status if "not registered" in status else None

        assert "DestinationRule demo/hbone-clustered is somebody else's" in until(
            told, EFFECT_S, "it is told"
        )
        path = "/apis/networking.istio.io/v1/namespaces/demo/destinationrules/hbone-clustered"
        there = objects.get(path)
        assert there is not None and there["spec"] == theirs["spec"]
        assert "labels" not in there["metadata"]
    finally:
        objects.delete([SERVICE, theirs])


def test_hbone_register_says_what_hgate_has_made_of_it(mesh: Workloads) -> None:
    objects = mesh.plane.objects
    environ = {"KUBECONFIG": str(mesh.plane.kubeconfig(kube.ADMIN, "somebody")), "PATH": os.environ["PATH"]}

    def register(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(SCRIPTS / "hbone"), "register", "-n", "demo", *arguments]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)

    ran = register(URL, "--name", "said", "--port", "8087", "--workload-account", "hello")
    assert (ran.returncode, ran.stderr) == (EXIT_OK, "")
    assert ran.stdout.endswith(f"\nstatus     routed to {URL}/_hbone/15003\n")
    path = "/apis/networking.istio.io/v1/namespaces/demo/serviceentries/hbone-said"
    until(lambda: objects.get(path), EFFECT_S, "it is registered")

    # What the administrator does not allow.
    ran = register("https://other.a.run.app", "--name", "said", "--port", "8087")
    assert (ran.returncode, ran.stderr) == (EXIT_DENIED, "")
    assert "\nstatus     refused: cluster.allow in hgate's file does not let namespace demo" in ran.stdout
    until(lambda: True if objects.get(path) is None else None, EFFECT_S, "nothing is registered")

    ran = register("--remove", "--name", "said")
    assert (ran.returncode, ran.stderr) == (EXIT_OK, "")
    assert objects.get("/api/v1/namespaces/demo/services/said") is None


def test_a_client_outside_reaches_a_service_inside(mesh: Workloads) -> None:
    """By its mesh name, with its own certificate, up to the sidecar of a pod: hgate opens nothing."""
    processes, certificates = mesh.plane.processes, mesh.folder / "outside"
    mesh.plane.certify("clients", "guest", certificates)
    mesh.plane.objects.apply(BACK)
    environ: dict[str, object] = {"PYTHONPATH": os.getcwd(), "HOST": "127.0.0.1", "PORT": 9000}
    app = processes.start("back-app", "echo", [sys.executable, "-m", "tests.mesh.app"], environ)
    sidecar = mesh.sidecar("echo", "echo", "demo", {"app": "back"})
    try:
        mesh.sidecar_ready(sidecar, "echo")
        client = [sys.executable, "-m", "tests.mesh.outside_client", GATEWAY, certificates]
        name = "outbound_.8080_._.back.demo.svc.cluster.local"

        def asked() -> dict[str, Any] | None:
            ran = run_in("guest", "env", f"PYTHONPATH={os.getcwd()}", *client, name)
            print(ran.stdout, ran.stderr)
            found: dict[str, Any] | None = json.loads(ran.stdout) if ran.stdout.startswith("{") else None
            return found

        told = until(asked, EFFECT_S, "an answer from the pod")
        assert told["path"] == "/from-outside"
        assert "URI=spiffe://cluster.local/ns/clients/sa/guest" in told["headers"]["x-forwarded-client-cert"]
        for other in (name.replace("back", "hello"), name.replace("8080", "9090")):
            ran = run_in("guest", "env", f"PYTHONPATH={os.getcwd()}", *client, other)
            assert "ssl.SSLError" in ran.stderr and not ran.stdout, other
    finally:
        sidecar.end()
        app.end()
        mesh.plane.objects.delete(reversed(BACK))

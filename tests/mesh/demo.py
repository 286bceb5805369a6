"""`hbone demo --mesh`: what `make demo` shows, in a real Istio mesh.

A control plane (etcd, kube-apiserver, istiod), hgate, a stand-in for Cloud Run, krun with an app, and two
clients with Istio's sidecars, each in a network namespace of its own. Only Cloud Run is not the real one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.needs import missing
from hbone.demo.client import random_body
from hbone.demo.printing import show, verdict
from shared.errors import EXIT_UNAVAILABLE
from tests import needs
from tests.mesh import build, control_plane, run
from tests.mesh.control_plane import ControlPlane
from tests.mesh.objects import manifest
from tests.mesh.places import PLACES, namespace, run_in, until
from tests.mesh.workloads import SERVICE, Answer, Workloads, ask

BODY_BYTES = 1 << 20

REQUESTS = 200

EFFECT_S = 15.0
"""For istiod's word to reach an Envoy."""

NAME = "hbone demo --mesh"

WEB, GUEST = (f"spiffe://cluster.local/ns/clients/sa/{name}" for name in ("web", "guest"))


def main() -> int:
    parser = argparse.ArgumentParser(prog=NAME)
    parser.add_argument("--inbound", default="auto")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    if run.RUNNING in os.environ:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _stop)
        inbound = "pilot-agent" if options.inbound == "auto" else options.inbound
        try:
            return _demo(Path(os.environ[run.RUNNING]), inbound, options.keep)
        except AssertionError as error:  # of what waits for something
            print(f"{NAME}: {error}", file=sys.stderr)
            return EXIT_UNAVAILABLE
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    lacking = [need for need in missing((*needs.ALL, *needs.TARGETS["mesh"])) if not need.left_out]
    if lacking:
        print(f"{NAME}: {'; '.join(need.message() for need in lacking)}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    return run.in_the_mesh("tests.mesh.demo", *sys.argv[1:])


def _demo(folder: Path, inbound: str, keep: bool) -> int:
    print("A real mesh, each machine in a network namespace of its own")
    with _took() as took, contextlib.ExitStack() as running:
        plane = running.enter_context(control_plane.running(build.built(), folder))
        _up(f"etcd, kube-apiserver and istiod on {PLACES['cp']}", took)
        workloads = _start(plane, inbound, took)
        good = _request(workloads, inbound, "GET", "/hello")
        good &= _request(workloads, inbound, "POST", "/echo", random_body(BODY_BYTES))
        good &= _many()
        good &= _policy(plane) if inbound == "pilot-agent" else _denied(workloads)
        if keep:
            _keep(folder)
        return verdict(good)


# Starting.


def _start(plane: ControlPlane, inbound: str, took: list[float]) -> Workloads:
    workloads = Workloads(plane)
    workloads.cloudrun()
    workloads.gateway()
    _up(f"hgate on {PLACES['cp']}:15442, with a stand-in for Cloud Run and its metadata server", took)
    plane.objects.apply(manifest("hello"))
    told = {"HBONE_LOG_FORMAT": "json", "HBONE_DENY": GUEST, "HBONE_APP_PROTOCOL": "http1"}
    krun = workloads.krun(inbound, told)
    workloads.krun_ready(krun)
    signed = "" if inbound == "pilot-agent" else ", its certificate from istiod"
    _up(f"krun on {PLACES['app']}:15009 with the app{signed}; mTLS end: {inbound}", took)
    for name in ("web", "guest"):
        sidecar = workloads.sidecar(name, name, "clients", {"app": name})
        workloads.sidecar_ready(sidecar, name)
        _up(f"{name} on {PLACES[name]}: pilot-agent with Envoy, account clients/{name}", took)
    return workloads


@contextlib.contextmanager
def _took() -> Iterator[list[float]]:
    """When the last thing was up."""
    yield [time.monotonic()]


def _up(what: str, took: list[float]) -> None:
    now = time.monotonic()
    print(f"  up: {what}  [{now - took[0]:.1f} s]", flush=True)
    took[0] = now


# Showing.


def _request(workloads: Workloads, inbound: str, method: str, path: str, body: bytes = b"") -> bool:
    """Prints a request's way, hop by hop; returns whether its answer was right."""
    print(f"\n{method} {path}, from web to http://{SERVICE}:8080")
    options: list[str] = []
    if body:
        file = workloads.folder / "body"
        file.write_bytes(body)
        options = ["--data-binary", f"@{file}"]
    answer = ask("web", path, *options)
    if answer.status != 200:
        show("client", f"status {answer.status}: {answer.body.strip()[:300]}", answer.seconds)
        return False
    saw = json.loads(answer.body)
    gate, container = _open_tunnels()
    show("web", "its Envoy, by istiod's configuration: mTLS to the gateway of the ServiceEntry")
    show("hgate", f"SNI seen {gate['sni']}")
    show("", f"route {gate['route']} → {gate['dst.addr']}, stream {gate['stream']}")
    show("Cloud Run", f"{container['peer']} → container (a stand-in, which has checked the token)")
    show("krun", f"target {container['target']} → {container['address']}, the mTLS end")
    client = answer.headers.get("x-forwarded-client-cert", "").rpartition("URI=")[2]
    show(inbound, f"the app is told of the client: {client or 'nothing'}")
    show("app", f"saw {method} {saw['path']} over HTTP/{saw['version']}, {saw['body']} bytes of body")
    show("client", f"status {answer.status}", answer.seconds)
    return (saw["path"], saw["body"], client) == (path, len(body), WEB)


def _many() -> bool:
    """Prints what becomes of many requests, several at once; returns whether all were answered."""
    print(f"\nGET /, {REQUESTS} times, 16 at once")
    told = ["-Z", "--parallel-max", "16", "-o", "/dev/null", "-w", "%{http_code} %{time_total}\n"]
    url = f"http://127.0.0.1:8080/[1-{REQUESTS}]"
    ran = run_in("web", "curl", "-sS", *told, "-H", f"Host: {SERVICE}:8080", url)
    rows = [line.split() for line in ran.stdout.splitlines()]
    answered = sorted(float(seconds) for code, seconds in rows if code == "200")
    show("client", f"{len(answered)} of {REQUESTS} answered with 200")
    if answered:
        show("", "the median one", answered[len(answered) // 2])
        show("", "the slowest", answered[-1])
    return len(answered) == REQUESTS


def _policy(plane: ControlPlane) -> bool:
    """Prints that an AuthorizationPolicy keeps a client out, and how soon; returns whether it did."""
    print("\nGET / from guest, whom an AuthorizationPolicy is about to keep out")
    before = ask("guest")
    show("guest", f"status {before.status}", before.seconds)
    plane.objects.apply(manifest("deny"))
    refused, denied_s = _until_status(403)
    show("istiod", f"DENY applied: status {refused.status} {refused.body.strip()}", denied_s)
    others = ask("web")
    show("web", f"status {others.status}, as before", others.seconds)
    plane.objects.delete(manifest("deny"))
    again, allowed_s = _until_status(200)
    show("istiod", f"DENY removed: status {again.status}", allowed_s)
    return (before.status, others.status) == (200, 200)


def _until_status(status: int) -> tuple[Answer, float]:
    """guest's first answer with this status, and the seconds until then."""
    began = time.monotonic()

    def look() -> Answer | None:
        answer = ask("guest")
        return answer if answer.status == status else None

    return until(look, EFFECT_S, f"status {status} for guest"), time.monotonic() - began


def _denied(workloads: Workloads) -> bool:
    """Prints that HBONE_DENY keeps a client out; returns whether it did."""
    print("\nGET / from guest, whom HBONE_DENY keeps out")
    answer = ask("guest")
    show("guest", f"status {answer.status} {answer.body.strip()[:120]}", answer.seconds)

    def told() -> dict[str, Any] | None:
        lines = workloads.folder.joinpath("krun.log").read_text().splitlines()
        found = [line for line in lines if GUEST in line and '"flags"' in line]
        return json.loads(found[-1]) if found else None

    record = until(told, EFFECT_S, f"a line of krun's about {GUEST}")
    show("krun", f"{record['flags']}: {record['error']}")
    return answer.status in (403, 503) and record["flags"] == "DENY"


def _open_tunnels() -> tuple[dict[str, Any], dict[str, Any]]:
    """A tunnel of web's, as hgate and krun tell it; the sidecar keeps its connection, so it is still open."""
    with urllib.request.urlopen("http://127.0.0.1:15000/tunnels", timeout=10) as answer:
        gate = [one for one in json.load(answer) if PLACES["web"] in json.dumps(one)]
    krun = json.loads(run_in("app", "curl", "-sS", "-m", "10", "http://127.0.0.1:15019/debug").stdout)
    assert gate and krun["tunnels"], "the tunnel is no longer open"
    return gate[-1], krun["tunnels"][-1]


def _keep(folder: Path) -> None:
    """Leaves everything running until a signal, and prints a command to try."""
    print(
        f"\nrunning until ^C; logs in {folder}; try:\n"
        f"ip netns exec {namespace('web')} curl -H 'Host: {SERVICE}:8080' http://127.0.0.1:8080/hello",
        flush=True,
    )
    try:
        threading.Event().wait()
    except (KeyboardInterrupt, SystemExit):
        print("", file=sys.stderr)


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())

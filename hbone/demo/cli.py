"""`hbone demo`: requests through all programs on this machine, printed hop by hop.

Commands, TLS and tokens are real; only Cloud Run is a stand-in. What is printed is what the processes have
logged.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from hbone.demo import mesh as demo_mesh
from hbone.demo.client import Answer, random_body, request
from hbone.demo.mesh import CLIENT_FILES, SNI, Mesh
from hbone.demo.printing import show, verdict
from hbone.demo.processes import Record
from shared.errors import UnavailableError, UpstreamError, UsageError

BODY_BYTES = 1 << 20
"""The POST's body: enough for several flow-control windows' worth of frames."""

UNKNOWN_SNI = "outbound_.8080_._.elsewhere.prod.svc.cluster.local"
LOG_TIMEOUT_S = 10.0


def run(options: argparse.Namespace) -> int:
    """Runs the demo; returns the exit code, 0 if every request did what it should. Raises
    UnavailableError, and UsageError for flags that do not go together."""
    if options.mesh:
        from hbone.demo import real_mesh

        return real_mesh.run(options)
    if options.inbound == "pilot-agent":
        raise UsageError("demo: --inbound pilot-agent takes --mesh: there is no istiod in this one")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup's SIG_IGN stays
            signal.signal(number, _stop)  # the processes have sessions of their own, so only we end them
    with tempfile.TemporaryDirectory(prefix="hbone-demo-") as folder:
        began = time.perf_counter()
        mesh = demo_mesh.start(Path(folder), options.inbound)
        try:
            took_s = time.perf_counter() - began
            print(f"up after {took_s:.1f} s: hgate on {mesh.gateway}, mTLS end: {mesh.inbound}")
            good = _show(mesh, _answer(mesh, "GET", "/hello"))
            good &= _show(mesh, _answer(mesh, "POST", "/echo", random_body(BODY_BYTES)))
            good &= _show_refusal(mesh)
            if options.keep:
                _keep(mesh)
        finally:
            mesh.stop()
    return verdict(good)


def _answer(mesh: Mesh, method: str, path: str, body: bytes = b"") -> Answer:
    """As `request`, whose error says what the others on the way have said about it."""
    try:
        return request(mesh, SNI, method, path, body)
    except UpstreamError as error:
        with contextlib.suppress(UnavailableError):
            mesh.hgate.wait_for(lambda record: bool(record.get("error")), LOG_TIMEOUT_S)
        said = [text for process in (mesh.hgate, mesh.cloudrun, mesh.krun) for text in process.faults()]
        raise UpstreamError("; ".join([str(error), *said])) from error


def _hops(mesh: Mesh, answer: Answer) -> tuple[Record, Record, Record, Record]:
    """What hgate, the front end, krun's tunnel and krun's mTLS end logged about one request."""
    client = f"127.0.0.1:{answer.port}"
    gate = mesh.hgate.wait_for(lambda record: record.get("src.addr") == client, LOG_TIMEOUT_S)
    sent = gate["bytes_sent"]
    front = mesh.cloudrun.wait_for(
        lambda record: record.get("message") == "request" and record.get("bytes_sent") == sent, LOG_TIMEOUT_S
    )
    tunnel = mesh.krun.wait_for(
        lambda record: record.get("tunnel.target") == "15003" and record.get("bytes_sent") == sent,
        LOG_TIMEOUT_S,
    )
    ends = mesh.krun.wait_for(
        lambda record: "identity" in record and record.get("bytes_recv", 0) >= answer.received_bytes,
        LOG_TIMEOUT_S,
    )
    return gate, front, tunnel, ends


def _show(mesh: Mesh, answer: Answer) -> bool:
    """Prints a request's way, hop by hop; returns whether its answer was right."""
    gate, front, tunnel, ends = _hops(mesh, answer)
    expires_in = front["token_expires"] - time.time()
    print(f"\n{answer.method} {answer.path}")
    show("client", f"TLS to {mesh.gateway}, SNI {SNI}", answer.connect_s + answer.handshake_s)
    show("hgate", f"SNI seen {gate['sni']}")
    show("", f"route {gate['route']} → {gate['origin']}")
    show("", f"stream {gate['stream']}, status {gate['status']}, open after {gate['setup'] * 1000:.0f} ms")
    show(
        "Cloud Run",
        f"token for {front['token_audience']}, valid {expires_in / 60:.0f} min, {front['caller']}",
    )
    show("", f"{front['path']} on stream {front['stream']} → container, status {front['status']}")
    open_ms = tunnel["duration"] * 1000
    show("krun", f"target {tunnel['tunnel.target']} → {tunnel['dst.addr']}, open for {open_ms:.0f} ms")
    show(mesh.inbound, f"mTLS peer {ends['identity']} → app {ends.get('dst.addr', 'none')}")
    show("client", f"{answer.tls}, server {answer.peer}")
    sent, received = gate["bytes_sent"], gate["bytes_recv"]
    show("", f"status {answer.status}, tunnel bytes {sent} sent, {received} received", answer.answer_s)
    right = answer.status == 200 and answer.intact and answer.peer == "spiffe://demo.local/ns/demo/sa/hello"
    show("", "body intact (SHA-256)" if answer.intact else "body DAMAGED")
    return right


def _show_refusal(mesh: Mesh) -> bool:
    """Prints that a name without a route is refused with a TLS alert; returns whether it was."""
    print(f"\nGET / with SNI {UNKNOWN_SNI}")
    try:
        request(mesh, UNKNOWN_SNI, "GET", "/")
    except UpstreamError as error:
        record = mesh.hgate.wait_for(lambda record: record.get("sni") == UNKNOWN_SNI, LOG_TIMEOUT_S)
        show("hgate", f"{record['flags']}: {record['error']}")
        show("client", f"got {error}")
        return record["flags"] == "NO_ROUTE" and "UNRECOGNIZED_NAME" in str(error)
    show("client", "got an answer instead of a refusal")
    return False


def _keep(mesh: Mesh) -> None:
    """Leaves everything running until a signal, and prints a command to try."""
    certificates, key, roots = (mesh.client_files / name for name in CLIENT_FILES)
    gateway = mesh.gateway
    try:
        print(
            f"\nrunning until ^C; logs in {mesh.folder}; hgate's page: http://{mesh.admin}/; try:\n"
            f"curl --http1.1 --cacert {roots} --cert {certificates} --key {key} "
            f"--resolve {SNI}:{gateway.port}:{gateway.host} https://{SNI}:{gateway.port}/hello",
            flush=True,
        )
        threading.Event().wait()
    except (KeyboardInterrupt, SystemExit):
        print("", file=sys.stderr)


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)

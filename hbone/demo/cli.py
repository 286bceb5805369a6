"""`hbone demo`: the main job end to end on this machine, told hop by hop.

Real commands, real TLS, real tokens; only Cloud Run itself is the stand-in. What is printed is read back from
what the processes logged, nothing of it is made up.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hbone.demo import mesh as worlds
from hbone.demo.client import Answer, random_body, request
from hbone.demo.mesh import CLIENT_FILES, HOST, SNI, Mesh
from hbone.demo.processes import Record
from shared.errors import EXIT_INTERNAL, EXIT_OK, UpstreamError

BODY_BYTES = 1 << 20
"""The POST's body: enough for several flow-control windows' worth of frames."""

UNKNOWN_SNI = "outbound_.8080_._.elsewhere.prod.svc.cluster.local"
LOG_TIMEOUT_S = 10.0


def run(arguments: Sequence[str]) -> int:
    """Runs the demo; 0 if every request did what it should."""
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hbone-demo-") as folder:
        began = time.perf_counter()
        mesh = worlds.start(Path(folder), options.inbound)
        try:
            print(
                f"up after {time.perf_counter() - began:.1f} s: hgate on {mesh.gateway}, mTLS end: {mesh.inbound}"
            )
            good = _tell(mesh, request(mesh, SNI, "GET", "/hello"))
            good &= _tell(mesh, request(mesh, SNI, "POST", "/echo", random_body(BODY_BYTES)))
            good &= _tell_refusal(mesh)
            if options.keep:
                _keep(mesh)
        finally:
            mesh.stop()
    print("demo: everything arrived as it should" if good else "demo: FAILED, see above")
    return EXIT_OK if good else EXIT_INTERNAL


def _tell(mesh: Mesh, answer: Answer) -> bool:
    """Prints one request's way, hop by hop, from the logs of those it passed."""
    client = f"127.0.0.1:{answer.port}"
    gate = _log_of(mesh, "hgate", lambda record: record.get("src.addr") == client)
    front = _log_of(
        mesh,
        "cloudrun",
        lambda record: record.get("message") == "request" and record.get("bytes_sent") == gate["bytes_sent"],
    )
    tunnel = _log_of(
        mesh,
        "krun",
        lambda record: (
            record.get("tunnel.target") == "15003" and record.get("bytes_sent") == gate["bytes_sent"]
        ),
    )
    ends = _log_of(
        mesh,
        "krun",
        lambda record: "identity" in record and record.get("bytes_recv", 0) >= answer.received_bytes,
    )
    expires_in = front["token_expires"] - time.time()
    print(f"\n{answer.method} {answer.path}")
    _line("client", f"TLS to {mesh.gateway}, SNI {SNI}", answer.connect_s + answer.handshake_s)
    _line("hgate", f"SNI seen {gate['sni']}")
    _line("", f"route {gate['route']} → {gate['origin']}")
    _line("", f"stream {gate['stream']}, status {gate['status']}, open after {gate['setup']}")
    _line(
        "Cloud Run",
        f"token for {front['token_audience']}, valid {expires_in / 60:.0f} min, {front['caller']}",
    )
    _line("", f"{front['path']} on stream {front['stream']} → container, status {front['status']}")
    _line("krun", f"target {tunnel['tunnel.target']} → {tunnel['dst.addr']}, open for {tunnel['duration']}")
    _line(mesh.inbound, f"mTLS peer {ends['identity']} → app {ends['dst.addr']}")
    _line("client", f"{answer.tls}, server {answer.peer}")
    sent, received = gate["bytes_sent"], gate["bytes_recv"]
    _line("", f"status {answer.status}, tunnel bytes {sent} sent, {received} received", answer.answer_s)
    right = answer.status == 200 and answer.intact and answer.peer == "spiffe://demo.local/ns/demo/sa/hello"
    _line("", "body intact (SHA-256)" if answer.intact else "body DAMAGED")
    return right


def _tell_refusal(mesh: Mesh) -> bool:
    """A name that no route takes gets a TLS alert, and no token is asked for."""
    print(f"\nGET / with SNI {UNKNOWN_SNI}")
    try:
        request(mesh, UNKNOWN_SNI, "GET", "/")
    except UpstreamError as error:
        record = _log_of(mesh, "hgate", lambda record: record.get("sni") == UNKNOWN_SNI)
        _line("hgate", f"{record['flags']}: {record['error']}")
        _line("client", f"got {error}")
        return record["flags"] == "NO_ROUTE" and "UNRECOGNIZED_NAME" in str(error)
    _line("client", "got an answer, which nobody should have given")
    return False


def _keep(mesh: Mesh) -> None:
    """Leaves everything running until a signal, and says how to use it."""
    certificates, key, roots = (mesh.client_files / name for name in CLIENT_FILES)
    gateway = mesh.gateway
    print(
        f"\nrunning until ^C; logs in {mesh.folder}; try:\n"
        f"curl --http1.1 --cacert {roots} --cert {certificates} --key {key} "
        f"--resolve {SNI}:{gateway.port}:{gateway.host} https://{SNI}:{gateway.port}/hello",
        flush=True,
    )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    print("", file=sys.stderr)


def _log_of(mesh: Mesh, name: str, wanted: object) -> Record:
    process = {"hgate": mesh.hgate, "cloudrun": mesh.cloudrun, "krun": mesh.krun}[name]
    assert callable(wanted)
    return process.wait_for(wanted, LOG_TIMEOUT_S)


def _line(who: str, what: str, seconds: float | None = None) -> None:
    took = "" if seconds is None else f"  [{seconds * 1000:.1f} ms]"
    print(f"  {who:10}{what}{took}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hbone demo", description=f"Sends requests for {HOST} through everything, on this machine."
    )
    parser.add_argument("--keep", action="store_true", help="leave it running and print a curl line")
    parser.add_argument(
        "--inbound", choices=("auto", "envoy", "builtin"), default="auto", help="what ends the mTLS (auto)"
    )
    return parser

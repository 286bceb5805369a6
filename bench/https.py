"""Real HTTPS requests through everything: h2load as the client, HAProxy as the app that ends its TLS.

h2load → hgate → HAProxy as Cloud Run's front end → krun → HAProxy as the app
"""

from __future__ import annotations

import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

from bench import subjects
from bench.cases import Case, Place
from bench.measure import TURNS, Measured, Sample
from bench.subjects import Subject, World
from bench.tools import BenchError, find_program

_APP = """\
global
  log stderr format raw daemon warning
  nbthread 1
defaults
  mode http
  timeout client 1m
frontend app
  bind 127.0.0.1:{port} ssl crt {pem} alpn http/1.1
  http-request return status 200 content-type text/plain string "hello from the app"
"""

PLACE = Place("https", subjects.whole_path, subjects.envoy_path, "tls")
REQUESTS = Case("HTTPS requests, 16 connections kept", PLACE, ("-n", "8000", "-c", "16"), "request")
CONNECTIONS = Case("HTTPS requests, a connection for each", PLACE, ("-n", "200", "-c", "200"), "request")


def https(world: World, turns: int = TURNS) -> Iterator[Measured]:
    """Both cases, ours and the peer in turns."""
    program = find_program("h2load", "nghttp2-client")
    with (
        subjects.haproxy(world, _APP) as app,
        subjects.whole_path(world, app.address) as ours,
        subjects.envoy_path(world, app.address) as peer,
    ):
        direct = Subject("direct", app.address)  # of the app no CPU time is counted
        for case in (REQUESTS, CONNECTIONS):
            measured = Measured(case, peer_name=peer.name)
            for turn in range(turns):
                both = [(measured.ours, ours), (measured.peer, peer)]
                for samples, subject in both if turn % 2 else reversed(both):
                    samples.append(_run(program, world, case, subject))
                measured.direct.append(_run(program, world, case, direct))
            yield measured


def _run(program: str, world: World, case: Case, subject: Subject) -> Sample:
    log = world.folder / "h2load.log"
    log.unlink(missing_ok=True)
    name = subjects.in_cluster(subjects.NAMES[0])  # h2load takes no underscore
    before = subject.cpu_seconds()
    done = subprocess.run(
        [
            *(program, "--h1", *case.scenario, f"--connect-to={subject.address}"),
            *(f"--log-file={log}", f"https://{name}/"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    spent = subject.cpu_seconds() - before
    wanted = int(case.scenario[1])
    if f"{wanted} succeeded" not in done.stdout:
        raise BenchError(f"h2load: not all of {wanted} requests succeeded: {_last(done.stdout)}")
    took = re.search(r"finished in ([\d.]+)(ms|s|us),", done.stdout)
    assert took is not None
    seconds = float(took[1]) * {"s": 1, "ms": 1e-3, "us": 1e-6}[took[2]]
    latencies = _latencies(log)
    parts = [statistics.quantiles(latencies, n=1000)[at] for at in (499, 989, 998)]
    return Sample(spent / wanted, 0.0, wanted / seconds, *parts)


def _latencies(log: Path) -> list[float]:
    """Microseconds of each request."""
    return [float(line.split()[2]) for line in log.read_text().splitlines()]


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"

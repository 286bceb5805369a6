"""krun's plain path beside reverse proxies in the same place: HTTP/2 without TLS in, HTTP/1.1 to the app.

python -m bench.plain_path [--turns N] [--bytes N]

h2load → krun, HAProxy, nghttpx or Envoy → an app that costs little. A peer that is not installed is left out.
What counts is CPU time of the process under test; the ratio is taken within a turn, and the median of the
turns' ratios is printed. `direct` is the same load without anything between, for the times on the clock.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import subjects
from bench.subjects import Subject, World
from bench.tools import BenchError, find_program

GIB = 1 << 30
BODY_BYTES = 16 << 20
"""Of one request in the bulk cases: h2load sends a file of this size again and again."""

GETS = 20_000
TIMEOUT_S = 300.0

NGHTTPX_THREADS = "1"

_HAPROXY = f"""\
{subjects.HAPROXY_DEFAULTS}  http-reuse always
frontend plain
  bind 127.0.0.1:{{port}} proto h2
  default_backend app
backend app
  server app {{app}}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One load."""

    name: str
    unit: str
    arguments: tuple[str, ...]
    """Of h2load, before the URL."""

    concurrency: tuple[str, ...]
    """Likewise, in HTTP/2; without anything between, in HTTP/1.1, a connection for each."""

    path: str
    units: float
    """How many of them one run is."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one subject, for one unit."""

    cpu_seconds: float
    seconds: float


def cases(folder: Path, size: int, gets: int) -> tuple[Case, ...]:
    """The loads: bulk ones move `size` bytes, others are `gets` requests."""
    body = folder / "body"
    with body.open("wb") as file:
        file.truncate(BODY_BYTES)
    times = str(max(1, size // BODY_BYTES))
    one, many = ("-c", "1", "-m", "1"), ("-c", "2", "-m", "16")
    bulk, small = ("-n", times, "-w", "24", "-W", "26"), ("-n", str(gets))
    return (
        Case("a GiB up", "GiB", (*bulk, "-d", str(body)), one, "/up", size / GIB),
        Case("a GiB down", "GiB", bulk, one, f"/{BODY_BYTES}", size / GIB),
        Case("GET of 64 bytes, one at a time", "request", small, one, "/64", gets),
        Case("GET of 64 bytes, 32 at a time", "request", small, many, "/64", gets),
    )


# Who stands in the place.


@contextmanager
def krun(world: World, app: str) -> Iterator[Subject]:
    """krun, without tunnels."""
    port = subjects.free_port()
    told = {**subjects.krun_environment(f"127.0.0.1:{port}", "127.0.0.1:1"), "HBONE_APP": app}
    with subjects.running("krun", world.environment.command("krun"), told, world, port) as subject:
        yield subject


@contextmanager
def haproxy(world: World, app: str) -> Iterator[Subject]:
    """HAProxy with one thread."""
    with subjects.haproxy(world, _HAPROXY, app=app) as subject:
        yield subject


@contextmanager
def nghttpx(world: World, app: str) -> Iterator[Subject]:
    """nghttpx with one worker."""
    program = find_program("nghttpx", "nghttp2-proxy")
    port = subjects.free_port()
    host, _, app_port = app.rpartition(":")
    command = [
        program,
        f"--frontend=127.0.0.1,{port};no-tls",
        f"--backend={host},{app_port}",
        f"--workers={NGHTTPX_THREADS}",
        "--single-process",
        "--conf=/dev/null",
        "--accesslog-file=/dev/null",
    ]
    with subjects.running("nghttpx", command, {}, world, port) as subject:
        yield subject


@contextmanager
def _app(world: World) -> Iterator[str]:
    port = subjects.free_port()
    command = [sys.executable, "-m", "bench.plain_app", str(port)]
    with subjects.running("app", command, {}, world, port) as subject:
        yield subject.address


# The runs.


def run(h2load: str, case: Case, subject: Subject, flags: Sequence[str]) -> Sample:
    """One run. Raises BenchError if a request failed."""
    before, began = subject.cpu_seconds(), time.monotonic()
    done = subprocess.run(
        [h2load, *flags, *case.arguments, f"http://{subject.address}{case.path}"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    seconds, spent = time.monotonic() - began, subject.cpu_seconds() - before
    if done.returncode or ", 0 failed, 0 errored, 0 timeout" not in done.stdout:
        lines = [line for line in done.stdout.splitlines() if line.startswith(("requests:", "status"))]
        raise BenchError(f"{subject.name}, {case.name}: {' '.join(lines) or done.stderr.strip()}")
    return Sample(spent / case.units, seconds / case.units)


def compare(turns: int, size: int, gets: int = GETS) -> Iterator[str]:
    """The table, line by line. Raises BenchError if a request failed."""
    h2load = find_program("h2load", "nghttp2-client")
    with tempfile.TemporaryDirectory(prefix="plain-path-") as name, ExitStack() as block:
        folder = Path(name)
        world = World.create(folder)
        app = block.enter_context(_app(world))
        standing: list[Subject] = []
        for start in (krun, haproxy, nghttpx, subjects.envoy_plain):
            try:
                standing.append(block.enter_context(start(world, app)))
            except BenchError as error:
                yield f"left out: {error}"
        direct = Subject("direct", app)
        yield f"{'':32}{'':9}" + "".join(f"{subject.name:>26}" for subject in standing) + f"{'direct':>12}"
        for case in cases(folder, size, gets):
            yield _row(h2load, case, standing, direct, turns)


def _row(h2load: str, case: Case, standing: list[Subject], direct: Subject, turns: int) -> str:
    samples: dict[str, list[Sample]] = {subject.name: [] for subject in (*standing, direct)}
    for turn in range(turns):
        for subject in standing if turn % 2 else reversed(standing):
            samples[subject.name].append(run(h2load, case, subject, case.concurrency))
        at_once = int(case.concurrency[1]) * int(case.concurrency[3])
        samples[direct.name].append(run(h2load, case, direct, ("--h1", "-c", str(at_once))))
    ours = samples[standing[0].name]
    row = f"{case.name:32}{case.unit:9}"
    for subject in standing:
        theirs = samples[subject.name]
        ratio = statistics.median(a.cpu_seconds / b.cpu_seconds for a, b in zip(ours, theirs, strict=True))
        cpu = statistics.median(sample.cpu_seconds for sample in theirs)
        clock = statistics.median(sample.seconds for sample in theirs)
        scale, unit = (1.0, "s") if case.unit == "GiB" else (1e6, "µs")
        row += f"{cpu * scale:8.2f} {unit:2} ({ratio:4.2f}) {clock * scale:6.1f}".rjust(26)
    clock = statistics.median(sample.seconds for sample in samples[direct.name])
    return row + f"{clock * (1.0 if case.unit == 'GiB' else 1e6):12.1f}"


def main() -> int:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3, help="how often each case runs (%(default)s)")
    parser.add_argument("--bytes", type=int, default=GIB, help="of the bulk cases (%(default)s)")
    arguments = parser.parse_args()
    try:
        print("CPU time of the process, krun's ratio to it, time on the clock, for one unit")
        for line in compare(arguments.turns, arguments.bytes):
            print(line, flush=True)
    except (BenchError, OSError) as error:
        print(f"plain_path: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

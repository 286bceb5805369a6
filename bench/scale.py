"""What open tunnels cost, as their number grows, and what the loss of a worker does.

python -m bench.scale [--most N] [--workers N] [--own-python]

For hgate with one worker and with several, and for krun: the memory of an idle tunnel, the CPU time of a new
one (opened and closed, 64 at a time) while so many others are open, and the CPU time of silence. Then one of
the workers is killed. The last table is a model, not a measurement: 100,000 tunnels by these figures
(docs/scale.md has its assumptions). It takes two to four minutes. Beyond 14,000 tunnels Linux looks for free
ports for long, which counts as krun's time: see there how to give it more.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import subjects, tools
from bench.accounting import descendants, proportional_bytes
from bench.image import OWN, environment
from bench.subjects import Start, Subject, World
from bench.tools import BenchError, client, serving
from shared.open_files import allow_many

STEPS = (1_000, 10_000)
MOST = 25_000
"""Of hgate's tunnels: all come from one address to one port, and Linux gives them 28,232 to come from."""

MOST_OF_ONE = 16_000
"""Of one process: the hard limit of open files here is 20,000."""

PROBE = 2_000
"""New tunnels that are opened and closed while the others are open."""

AT_ONCE = 64
SILENCE_S = 5.0
START_S = 30.0
"""For a worker's successor."""

MODELLED = 100_000
MODELS = ((1, 4), (2, 2), (4, 1), (4, 2), (10, 1))
"""Replicas, and workers of each."""


@dataclass(frozen=True, slots=True)
class Step:
    """What was measured while `tunnels` were open."""

    tunnels: int
    tunnel_bytes: float
    """Memory of an open tunnel (PSS), of all processes."""

    open_us: float
    """CPU time of a new tunnel, its end included, in µs."""

    idle_share: float
    """CPU time of all while nobody says anything, as a part of one core."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What the end of a worker did."""

    before: int
    lost: int
    """Tunnels that were the worker's."""

    back_s: float
    """Until a successor was there."""

    reopened: int
    open_us: float
    """CPU time of each new tunnel of those that came back, in µs."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one of several replicas has to bear, by the model."""

    replicas: int
    workers: int
    memory_mib: float
    """Of one replica, after another is lost."""

    descriptors: int
    """Of one worker, likewise."""

    storm_s: float
    """Until all tunnels of a lost replica are open again, if their clients come at once."""


def plan(
    tunnels: int, replicas: int, workers: int, *, tunnel_bytes: float, idle_bytes: float, open_us: float
) -> Plan:
    """The model: tunnels are spread evenly, a worker has a core of its own, and one replica is lost. Of a
    single replica it is what its successor has to bear. `idle_bytes` is a worker without tunnels."""
    left = max(1, replicas - 1)
    each = math.ceil(tunnels / left)
    lost = math.ceil(tunnels / replicas)
    of_worker = math.ceil(each / workers)
    streams = 100
    return Plan(
        replicas,
        workers,
        (each * tunnel_bytes + workers * idle_bytes) / 2**20,
        of_worker + math.ceil(of_worker / streams),
        lost * open_us / 1e6 / (left * workers),
    )


def measured(world: World, start: Start, far: str, steps: Sequence[int], *, h2: bool) -> list[Step]:
    """One row for each of `steps`, on one process from start to end."""
    found: list[Step] = []
    hellos = () if h2 else world.hellos
    with start(world, far) as subject, ExitStack() as block:
        _probe(subject, h2, hellos)  # what a process keeps anyhow is not counted
        idle = _memory(subject)
        standing = 0
        for count in steps:
            for part in _parts(count - standing):
                block.enter_context(
                    client(subject.address, ("hold", "--tunnels", str(part)), h2=h2, hellos=hellos)
                )
            standing = count
            held = (_memory(subject) - idle) / count
            began = subject.cpu_seconds()
            time.sleep(SILENCE_S)
            share = (subject.cpu_seconds() - began) / SILENCE_S
            open_us = _probe(subject, h2, hellos, share)
            found.append(Step(count, held, open_us, share))
    return found


def _parts(count: int) -> list[int]:
    """`count` tunnels for clients of which none opens too many files."""
    clients = math.ceil(count / (MOST_OF_ONE / 2))
    return [count // clients + (number < count % clients) for number in range(clients)] if clients else []


def _probe(subject: Subject, h2: bool, hellos: Sequence[Path], idle_share: float = 0.0) -> float:
    """CPU time of a new tunnel in µs, without what the open ones cost meanwhile."""
    scenario = ("open", "--tunnels", str(AT_ONCE), "--count", str(PROBE))
    with client(subject.address, scenario, h2=h2, hellos=hellos) as load:
        began, cpu = time.monotonic(), subject.cpu_seconds()
        load.run()
        spent = subject.cpu_seconds() - cpu - idle_share * (time.monotonic() - began)
        return spent / PROBE * 1e6


def _memory(subject: Subject) -> int:
    return sum(map(proportional_bytes, subject.pids))


def loss(world: World, far: str, tunnels: int, workers: int) -> Loss:
    """Kills one of hgate's workers while `tunnels` are open, and opens as many anew as it had."""
    metrics = subjects.free_port()
    start = partial(subjects.hgate, workers=workers, max_connections=2 * MOST, metrics=metrics)
    with start(world, far) as subject, ExitStack() as block:
        for part in _parts(tunnels):
            block.enter_context(
                client(subject.address, ("hold", "--tunnels", str(part)), hellos=world.hellos)
            )
        before = _metric(metrics, "hbone_tunnels_open")
        victim = max(subject.pids, key=_descriptors)
        parent = min(subject.pids)
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        while not _metric(metrics, "hbone_worker_restarts_total"):
            if time.monotonic() - began > START_S:
                raise BenchError("no successor has come")
            time.sleep(0.02)
        back_s = time.monotonic() - began
        left = _metric(metrics, "hbone_tunnels_open")
        lost = before - left
        subject.pids = descendants(parent)
        cpu = subject.cpu_seconds()
        for part in _parts(lost):
            block.enter_context(
                client(subject.address, ("hold", "--tunnels", str(part)), hellos=world.hellos)
            )
        open_us = (subject.cpu_seconds() - cpu) / lost * 1e6
        return Loss(before, lost, back_s, _metric(metrics, "hbone_tunnels_open") - left, open_us)


def _metric(port: int, name: str) -> int:
    """The sum over its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=START_S) as answer:
        text = answer.read().decode()
    values = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return int(sum(map(float, values)))


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def table(name: str, steps: Sequence[Step]) -> str:
    """The rows, each with the ratio of its cost to that of the first."""
    rows = [f"{name:<24}{'KiB a tunnel':>14}{'µs a new one':>14}{'ratio':>8}{'silence':>10}"]
    rows += [
        f"{step.tunnels:>15,} open    {step.tunnel_bytes / 1024:>14.1f}{step.open_us:>14.0f}"
        f"{step.open_us / steps[0].open_us:>8.2f}{step.idle_share:>10.1%}"
        for step in steps
    ]
    return "\n".join(rows)


def _run(most: int, workers: int, world: World) -> None:
    one = [step for step in (*STEPS, MOST_OF_ONE) if step <= most]
    several = [step for step in (*STEPS, most) if step <= most]
    gateway = partial(subjects.hgate, max_connections=2 * MOST)
    with serving("tls", world.certificate, world.key) as far:
        of_one = measured(world, gateway, far, one, h2=False)
        print(table("hgate, one worker", of_one), flush=True)
        of_all = measured(world, partial(gateway, workers=workers), far, sorted(set(several)), h2=False)
        print("\n" + table(f"hgate, {workers} workers", of_all), flush=True)
        found = loss(world, far, min(most, STEPS[-1]), workers)
        print(
            f"\none of {workers} workers is killed: {found.lost:,} of {found.before:,} tunnels lost, "
            f"successor after {found.back_s:.1f} s,\n{found.reopened:,} opened again "
            f"for {found.open_us:.0f} µs each",
            flush=True,
        )
        with gateway(world, far) as subject:
            _probe(subject, False, world.hellos)
            idle = _memory(subject)
    with serving("tcp") as far:
        print("\n" + table("krun", measured(world, subjects.krun, far, one, h2=True)), flush=True)
    last = of_one[-1]
    costs = {"tunnel_bytes": last.tunnel_bytes, "idle_bytes": float(idle), "open_us": last.open_us}
    print(f"\nmodel of {MODELLED:,} tunnels, after the loss of one replica")
    for replicas, each in MODELS:
        planned = plan(MODELLED, replicas, each, **costs)
        print(
            f"{replicas:>3} replicas of {each} workers: {planned.memory_mib:,.0f} MiB a replica, "
            f"{planned.descriptors:,} descriptors a worker, all open again after {planned.storm_s:.1f} s"
        )


def main() -> int:
    """Measures, and prints tables."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--most", type=int, default=MOST, help="tunnels at most (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="of hgate (%(default)s)")
    parser.add_argument(
        "--own-python", action="store_true", help="of hgate and krun, though it be older than the images'"
    )
    arguments = parser.parse_args()
    allow_many()
    try:
        with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
            tools.build()
            world = World.create(Path(folder), OWN if arguments.own_python else environment())
            _run(arguments.most, arguments.workers, world)
    except (BenchError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

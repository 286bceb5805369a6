"""What is measured once or a few times, not in turns of load: memory, start-up, and how cost grows."""

from __future__ import annotations

import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from bench import subjects
from bench.cases import AGENT, GATEWAY, Case, Place
from bench.measure import Stand, measure, standing
from bench.subjects import Start, World
from bench.tools import client, serving

STARTS = 10
"""Of a command whose start-up is measured; the median counts."""

SCALE_TURNS = 3


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of ours, the peer's if it has one, and what to aim at."""

    name: str
    unit: str
    ours: float
    peer: float | None = None
    mark: float | None = None
    """Largest ratio to the peer's; without a peer, the largest value."""

    @property
    def ratio(self) -> float | None:
        """Ours to the peer's."""
        return None if self.peer is None else self.ours / self.peer

    @property
    def met(self) -> bool | None:
        """Whether the mark is reached; None if there is none."""
        if self.mark is None:
            return None
        return (self.ours if self.ratio is None else self.ratio) <= self.mark


@contextmanager
def _far(world: World, place: Place) -> Iterator[str]:
    files = (world.certificate, world.key) if place.far == "tls" else ()
    with serving(place.far, *files) as far:
        yield far


def memory(world: World) -> Iterator[Figure]:
    """Of an idle process, and of each idle tunnel at 1,000 and at 10,000."""
    for place in (GATEWAY, AGENT):
        with _far(world, place) as far:
            ours = {count: _held(world, place, place.ours, far, count) for count in (1_000, 10_000)}
            peer = {count: _held(world, place, place.peer, far, count) for count in (1_000, 10_000)}
        yield Figure(
            f"{place.name}: memory (RSS) when idle",
            "MiB",
            ours[1_000][0] / 2**20,
            peer[1_000][0] / 2**20,
            0.8,
        )
        for count in (1_000, 10_000):
            name = f"{place.name}: memory of an idle tunnel, {count:,} held"
            yield Figure(name, "KiB", ours[count][1] / 1024, peer[count][1] / 1024, 0.25)


def _held(world: World, place: Place, start: Start, far: str, count: int) -> tuple[float, float]:
    """Bytes of the process before the first tunnel, and of each of `count` tunnels."""
    hellos = world.hellos if place.hello else ()
    with start(world, far) as subject:
        idle = subject.resident_bytes()
        with client(subject.address, ("hold", "--tunnels", str(count)), h2=place.h2, hellos=hellos):
            return idle, (subject.resident_bytes() - idle) / count


def start_up(world: World) -> Iterator[Figure]:
    """From exec until the port answers; of the commands, until they have done something."""
    for place in (GATEWAY, AGENT):
        with _far(world, place) as far:
            ours = statistics.median(_started(world, place.ours, far) for _ in range(5))
            peer = statistics.median(_started(world, place.peer, far) for _ in range(5))
        yield Figure(f"{place.name}: start until the port answers", "ms", ours * 1e3, peer * 1e3)
    whole = statistics.median(_krun_true(world) for _ in range(STARTS))
    yield Figure("krun true: exec to exit", "ms", whole, None, 120)
    first = statistics.median(_first_byte(world) for _ in range(STARTS))
    yield Figure("hbone URL: exec to first byte on the wire", "ms", first, None, 60)


def _started(world: World, start: Start, far: str) -> float:
    with start(world, far) as subject:
        return subject.started_in_s


def _krun_true(world: World) -> float:
    told = subjects.krun_environment("127.0.0.1:0", "127.0.0.1:1")
    told["HBONE_APP"] = f"127.0.0.1:{subjects.free_port()}"
    began = time.perf_counter()
    subprocess.run([*world.environment.command("krun"), "true"], env=told, capture_output=True, check=True)
    return (time.perf_counter() - began) * 1e3


def _first_byte(world: World) -> float:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/_hbone/22"
        began = time.perf_counter()
        process = subprocess.Popen(
            [*world.environment.command("hbone"), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            accepted, _ = server.accept()
            with accepted:
                accepted.recv(1)
                return (time.perf_counter() - began) * 1e3
        finally:
            process.kill()
            process.communicate()


@dataclass(frozen=True, slots=True)
class Curve:
    """How a figure grows: CPU time in µs per round trip of ours and of the peer, by what grows."""

    name: str
    by: str
    ours: dict[int, float]
    peer: dict[int, float]


def growth(world: World) -> Iterator[Curve]:
    """Cost of a 64-byte round trip by tunnels, by origins and by workers."""
    for place in (GATEWAY, AGENT):
        cases = {n: _case(place, tunnels=n) for n in (1, 4, 16, 64, 256, 1024)}
        yield _curve(world, f"{place.name}: by tunnels", "tunnels", {n: (place, c) for n, c in cases.items()})
    cases = {n: _case(GATEWAY, tunnels=64, origins=n) for n in (1, 4, 16)}
    yield _curve(
        world, "hgate: by origins, 64 tunnels", "origins", {n: (GATEWAY, c) for n, c in cases.items()}
    )
    yield _curve(
        world,
        "hgate: by workers, 64 tunnels",
        "workers",
        {n: (_with_workers(n), _case(GATEWAY, tunnels=64)) for n in (1, 2)},
    )


def _case(place: Place, *, tunnels: int, origins: int = 1) -> Case:
    scenario = ("rr", "--tunnels", str(tunnels), "--size", "64", "--seconds", "1")
    return Case(f"{tunnels} tunnels", place, scenario, "round trip", tunnels=tunnels, origins=origins)


def _with_workers(count: int) -> Place:
    return replace(
        GATEWAY,
        ours=partial(subjects.hgate, workers=count),
        peer=partial(subjects.envoy_gateway, workers=count),
    )


def _curve(world: World, name: str, by: str, points: dict[int, tuple[Place, Case]]) -> Curve:
    ours: dict[int, float] = {}
    peer: dict[int, float] = {}
    stands: dict[int, Stand] = {}
    with ExitStack() as block:
        for number, (place, case) in points.items():
            if id(place) not in stands:
                stands[id(place)] = block.enter_context(standing(world, place))
            measured = measure(stands[id(place)], case, SCALE_TURNS)
            ours[number] = statistics.median(sample.cpu_seconds for sample in measured.ours) * 1e6
            peer[number] = statistics.median(sample.cpu_seconds for sample in measured.peer) * 1e6
    return Curve(name, by, ours, peer)

"""One case measured: ours and the peer in turns, in one run, on the same wire.

The machine's noise comes and goes in seconds. So a turn loads one right after the other, their order changes
from turn to turn, the ratio is taken within a turn, and the median of the turns' ratios is what counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from bench.cases import Case, Place
from bench.subjects import Subject, World
from bench.tools import client, far_away, serving

TURNS = 4
"""More would take the whole beyond a quarter of an hour."""

DISTANT_WINDOW_BYTES = 64 << 20
"""What may be sent ahead to a far end that is not near: its window is not to be what limits an upload."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one run came to."""

    cpu_seconds: float
    """Of the process under test, for one unit."""

    load_cpu_seconds: float
    """Of the load generator, for one unit."""

    per_second: float
    """Units."""

    p50_us: float
    p99_us: float
    p999_us: float


@dataclass(slots=True)
class Measured:
    """A case, what was measured, and what that says."""

    case: Case
    ours: list[Sample] = field(default_factory=list)
    peer: list[Sample] = field(default_factory=list)
    direct: list[Sample] = field(default_factory=list)
    """The same load without anything between the two ends; empty where there is no latency to compare."""

    peer_name: str = "envoy"

    def ratios(self) -> list[float]:
        """Of CPU time, ours to the peer's, one a turn."""
        return [a.cpu_seconds / b.cpu_seconds for a, b in zip(self.ours, self.peer, strict=True)]

    def added_us(self, samples: Sequence[Sample], name: str) -> list[float]:
        """The latency `name` (p50_us, p99_us, p999_us) above that of a direct connection, one a turn."""
        return [
            getattr(sample, name) - getattr(direct, name)
            for sample, direct in zip(samples, self.direct, strict=True)
        ]

    def rate_ratio(self) -> float:
        """Of throughput, ours to the peer's: the median of the turns'."""
        return statistics.median(
            a.per_second / b.per_second for a, b in zip(self.ours, self.peer, strict=True)
        )

    def p50_ratio(self) -> float | None:
        """Of the median latency, ours to the peer's: the median of the turns'. None if there is none."""
        if not self.ours[0].p50_us:
            return None
        return statistics.median(a.p50_us / b.p50_us for a, b in zip(self.ours, self.peer, strict=True))

    def latency_ratio(self) -> float | None:
        """Of the added p99: the median of the turns'. None if there is none to compare."""
        if not self.direct or not self.ours[0].p99_us:
            return None
        ours, peer = self.added_us(self.ours, "p99_us"), self.added_us(self.peer, "p99_us")
        return statistics.median(ours) / statistics.median(peer)


@dataclass(frozen=True, slots=True)
class Stand:
    """A place with both subjects running."""

    world: World
    place: Place
    ours: Subject
    peer: Subject
    direct: Subject
    """The app itself, whose CPU time is not counted."""


@contextmanager
def standing(world: World, place: Place) -> Iterator[Stand]:
    """Starts what is behind, both subjects, and an app for direct connections."""
    with ExitStack() as block:
        files = (world.certificate, world.key) if place.far == "tls" else ()
        window = DISTANT_WINDOW_BYTES if place.round_trip_ms else None
        far = block.enter_context(serving(place.far, *files, window_bytes=window))
        if place.round_trip_ms:
            far = block.enter_context(far_away(far, place.round_trip_ms))
        direct = block.enter_context(serving("h2" if place.h2 else "tcp"))
        if place.round_trip_ms:
            direct = block.enter_context(far_away(direct, place.round_trip_ms))
        ours = block.enter_context(place.ours(world, far))
        peer = block.enter_context(place.peer(world, far))
        yield Stand(world, place, ours, peer, Subject("direct", direct))


def measure(stand: Stand, case: Case, turns: int = TURNS) -> Measured:
    """Loads both in turns. Raises BenchError if a tunnel broke."""
    measured = Measured(case, peer_name=stand.peer.name)
    with_latency = case.scenario[0] in ("rr", "open")
    for turn in range(turns):
        both = [(measured.ours, stand.ours), (measured.peer, stand.peer)]
        for samples, subject in both if turn % 2 else reversed(both):
            samples.append(_run(stand, case, subject))
        if with_latency:
            measured.direct.append(_run(stand, case, stand.direct))
    return measured


def _run(stand: Stand, case: Case, subject: Subject) -> Sample:
    place = stand.place
    hellos = stand.world.hellos[: case.origins] if place.hello else ()
    with client(subject.address, case.scenario, h2=place.h2, hellos=hellos) as load:
        before = subject.cpu_seconds()
        result = load.run()
        spent = subject.cpu_seconds() - before
    units = result.operations / case.per
    return Sample(
        spent / units,
        result.load_cpu_seconds / units,
        units / result.seconds,
        result.p50_us,
        result.p99_us,
        result.p999_us,
    )

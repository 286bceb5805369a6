"""The cases: what is loaded how, and which peer stands beside it. A table, so that it can be read as one.

A case names the place (what is before and behind the process under test), and a scenario of the load
generator. `marks` are the ratios to Envoy that the project wants to reach, on the figure that they name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from bench import subjects
from bench.subjects import Start

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Place:
    """Where the process under test stands."""

    name: str
    ours: Start
    peer: Start
    far: str
    """What is behind it: `tls`, `h2` or `tcp` (`tools.serving`)."""

    h2: bool = False
    """Whether it is asked in HTTP/2."""

    hello: bool = False
    """Whether a tunnel begins with a ClientHello."""

    round_trip_ms: float = 0.0
    """Of the path to what is behind it, in milliseconds (`tools.far_away`)."""


GATEWAY = Place("hgate", subjects.hgate, subjects.envoy_gateway, "tls", hello=True)
AGENT = Place("krun", subjects.krun, subjects.envoy_agent, "tcp", h2=True)
FORWARD = Place(
    "forward",
    partial(subjects.hgate, forward=True),
    partial(subjects.envoy_gateway, forward=True),
    "tcp",
    hello=True,
)
PATH = Place("path", subjects.whole_path, subjects.envoy_path, "tcp", hello=True)


def _distant(round_trip_ms: int) -> Place:
    return replace(GATEWAY, name=f"{round_trip_ms}ms", round_trip_ms=round_trip_ms)


def _cold(place: Place) -> Place:
    """Without a connection to what is behind it."""
    return replace(
        place, ours=partial(subjects.hgate, cold=True), peer=partial(subjects.envoy_gateway, cold=True)
    )


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that is measured, of ours and of the peer in turns."""

    name: str
    place: Place
    scenario: tuple[str, ...]
    unit: str
    """What CPU time is divided by: tunnel, round trip, GiB."""

    per: int = 1
    """Operations of the load generator in one unit."""

    tunnels: int = 1
    origins: int = 1
    """Services that the tunnels lead to, in turn."""

    mark: float | None = None
    """The ratio of CPU time to aim at."""

    latency_mark: float | None = None
    """The same for the p99 latency that it adds."""

    rate_mark: float | None = None
    """The ratio of throughput to reach at least."""

    p50_mark: float | None = None
    """The ratio of the median latency to aim at, of which the path's own is a part."""


def _open(place: Place, at_once: int, mark: float | None) -> Case:
    count = 1000 if at_once == 1 else 3000
    scenario = ("open", "--tunnels", str(at_once), "--count", str(count))
    return Case(f"new tunnels, {at_once} at a time", place, scenario, "tunnel", tunnels=at_once, mark=mark)


def _round_trips(
    place: Place, size: int, tunnels: int, mark: float | None = None, latency: float | None = None
) -> Case:
    scenario = ("rr", "--tunnels", str(tunnels), "--size", str(size), "--seconds", "1")
    what = "64 bytes" if size == 64 else "1 KiB"
    name = f"round trips of {what}, {tunnels} tunnel{'s' if tunnels > 1 else ''}"
    return Case(name, place, scenario, "round trip", tunnels=tunnels, mark=mark, latency_mark=latency)


def _paced(place: Place, tunnels: int, rate: int) -> Case:
    scenario = ("rr", "--tunnels", str(tunnels), "--size", "64", "--seconds", "2", "--rate", str(rate))
    return Case(
        f"{rate:,} round trips a second, {tunnels} tunnels", place, scenario, "round trip", tunnels=tunnels
    )


def _bulk(place: Place, way: str, tunnels: int, mark: float | None = None, mib: int = 512) -> Case:
    each = mib * MIB // tunnels
    up, down = (each if way in ("up", "both ways") else 0), (each if way in ("down", "both ways") else 0)
    scenario = ("bulk", "--tunnels", str(tunnels), "--up", str(up), "--down", str(down))
    name = f"bulk {way}, {tunnels} tunnel{'s' if tunnels > 1 else ''}"
    return Case(name, place, scenario, "GiB", per=GIB, tunnels=tunnels, mark=mark)


def _both(place: Place, open_mark: float) -> Sequence[Case]:
    return (
        _open(place, 1, None),
        _open(place, 64, open_mark),
        _round_trips(place, 64, 1),
        _round_trips(place, 64, 32, 1.0, 1.0),
        _round_trips(place, 64, 256),
        _round_trips(place, 1024, 1),
        _round_trips(place, 1024, 32),
        _round_trips(place, 1024, 256),
        _paced(place, 32, 2000),
        *(_bulk(place, way, tunnels, 1.0) for way in ("up", "down") for tunnels in (1, 8)),
        *(_bulk(place, "both ways", tunnels) for tunnels in (1, 8)),
    )


def _over_distance(
    round_trip_ms: int, mib: int, rate_mark: float | None, first_byte_mark: float | None
) -> Sequence[Case]:
    place = _distant(round_trip_ms)
    first_byte = ("open", "--tunnels", "1", "--count", str(max(10, 2000 // round_trip_ms)))
    return (
        Case("connect to first byte, warm", place, first_byte, "tunnel", p50_mark=first_byte_mark),
        *(
            replace(_bulk(place, way, tunnels, mib=mib), rate_mark=rate_mark)
            for way in ("up", "down")
            for tunnels in (1, 8)
        ),
        # Elsewhere hgate's connection is often there still, or again, when the next tunnel comes.
        *(
            [Case("connect to first byte, cold", _cold(place), first_byte, "tunnel")]
            if first_byte_mark is not None
            else []
        ),
    )


CASES: tuple[Case, ...] = (
    *_both(GATEWAY, 0.7),
    *_both(AGENT, 1.0),
    _open(PATH, 1, None),
    _open(PATH, 64, None),
    _round_trips(PATH, 64, 32),
    _paced(PATH, 32, 2000),
    _bulk(PATH, "up", 8),
    _bulk(PATH, "down", 8),
    _bulk(FORWARD, "up", 1, 0.9),
    _bulk(FORWARD, "down", 1, 0.9),
    _bulk(FORWARD, "both ways", 8),
    _round_trips(FORWARD, 64, 32),
    _open(FORWARD, 64, None),
    *_over_distance(10, 512, None, None),
    *_over_distance(40, 256, 0.95, 0.55),
    *_over_distance(150, 128, 0.9, None),
)

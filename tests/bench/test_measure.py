"""One turn of real cases, hgate and krun beside a real Envoy."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cases import AGENT, FORWARD, GATEWAY, Case, Place
from bench.measure import Measured, Sample, measure, standing
from bench.subjects import World
from tests.support.world import find_envoy

FEW = ("open", "--tunnels", "2", "--count", "20", "--warm-up", "1")


@pytest.mark.parametrize("place", [GATEWAY, AGENT, FORWARD], ids=lambda place: place.name)
def test_one_turn(place: Place, tmp_path: Path) -> None:
    find_envoy()
    case = Case("few", place, FEW, "tunnel", tunnels=2)
    with standing(World.create(tmp_path), place) as stand:
        measured = measure(stand, case, turns=1)
    (ours,), (peer,), (direct,) = measured.ours, measured.peer, measured.direct
    assert measured.peer_name == "envoy"
    assert 0 < ours.cpu_seconds < 1
    assert 0 < peer.cpu_seconds < 1
    assert direct.cpu_seconds == 0
    assert measured.ratios() == [ours.cpu_seconds / peer.cpu_seconds]


def sample(cpu_seconds: float, p99_us: float = 0.0) -> Sample:
    return Sample(cpu_seconds, 0, 1, 0, p99_us, 0)


def test_ratios_are_taken_within_a_turn() -> None:
    """A turn in which everything was slow says the same as the others."""
    case = Case("some", AGENT, ("bulk",), "GiB")
    measured = Measured(case, [sample(1.0), sample(10.0)], [sample(2.0), sample(20.0)])
    assert measured.ratios() == [0.5, 0.5]
    assert measured.latency_ratio() is None


def test_added_latency() -> None:
    case = Case("some", AGENT, ("rr",), "round trip")
    measured = Measured(case, [sample(1, 110)], [sample(1, 60)], [sample(0, 10)])
    assert measured.latency_ratio() == 2.0

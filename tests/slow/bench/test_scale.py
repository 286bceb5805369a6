"""What open tunnels cost: the model's arithmetic, and one small measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import scale, subjects, tools
from bench.scale import Step, plan, table
from bench.subjects import World
from bench.tools import BenchError, serving

COSTS = {"tunnel_bytes": 4096.0, "idle_bytes": 40.0 * 2**20, "open_us": 200.0}


def test_one_replica_less() -> None:
    """Four with 100,000 tunnels: three have 33,334 each then, and 25,000 come back to six workers."""
    planned = plan(100_000, 4, 2, **COSTS)
    assert planned.descriptors == 16_667 + 167
    assert planned.memory_mib == pytest.approx(33_334 / 256 + 80)
    assert planned.storm_s == pytest.approx(25_000 * 200e-6 / 6)


def test_a_single_one_has_all_of_it() -> None:
    assert plan(100_000, 1, 4, **COSTS).descriptors == 25_000 + 250


@given(st.integers(1, 1_000_000), st.integers(2, 100), st.integers(1, 16))
def test_more_replicas_never_bear_more(tunnels: int, replicas: int, workers: int) -> None:
    few, more = (plan(tunnels, number, workers, **COSTS) for number in (replicas, replicas + 1))
    assert (more.memory_mib, more.descriptors) <= (few.memory_mib, few.descriptors)
    assert more.storm_s <= few.storm_s


@given(st.integers(0, 100_000))
def test_no_client_opens_more_files_than_it_may(count: int) -> None:
    parts = scale._parts(count)
    assert sum(parts) == count
    assert max(parts, default=0) <= scale.MOST_OF_ONE


def test_a_table_has_the_ratio_to_its_first_row() -> None:
    rows = table("hgate", [Step(1_000, 4096.0, 200.0, 0.001), Step(10_000, 6144.0, 250.0, 0.01)]).splitlines()
    assert rows[1].split() == ["1,000", "open", "4.0", "200", "1.00", "0.1%"]
    assert rows[2].split() == ["10,000", "open", "6.0", "250", "1.25", "1.0%"]


def test_tunnels_are_held_and_a_worker_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        tools.build()
    except BenchError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(scale, "SILENCE_S", 0.1)
    monkeypatch.setattr(scale, "PROBE", 100)
    world = World.create(tmp_path)
    with serving("tls", world.certificate, world.key) as far:
        (step,) = scale.measured(world, subjects.hgate, far, [50], h2=False)
        assert step.tunnels == 50
        assert step.open_us > 0
        found = scale.loss(world, far, 200, 2)
        assert found.before == 200
        assert 0 < found.lost < 200, "the other worker's stay"
        assert found.reopened == found.lost

"""The long run's parts in small: that they measure what they say. `make stress` has the real numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hyperframe.frame import Frame

from tests.stress import attack, churn, idle, names, probes, services, uploads
from tests.stress.figures import percentile
from tests.stress.run import Run
from tests.stress.table import Row, render
from tests.stress.visits import VISITS
from tests.support import attacker, stalls
from tests.support.attack_frames import PREFACE
from tests.support.attacker import End
from tests.support.floods import Flood, floods, one_byte_frames
from tests.support.world import find_program

pytestmark = pytest.mark.xdist_group("stress")  # one at a time: each is a load for the others

FRAME_HEADER_BYTES = 9

FLOODS = floods(attack.PATH)


def frames(data: bytes) -> list[int | None]:
    """The types of the frames in `data`, which is whole frames."""
    found = []
    while data:
        frame, length = Frame.parse_frame_header(memoryview(data[:FRAME_HEADER_BYTES]))
        size = FRAME_HEADER_BYTES + length
        frame.parse_body(memoryview(data[FRAME_HEADER_BYTES:size]))
        found.append(frame.type)
        data = data[size:]
    return found


def verdicts(run: Run) -> dict[str, bool]:
    """By the part of the scenario."""
    return {row.scenario.partition(": ")[2]: row.passed for row in run.rows}


async def test_tunnels_are_held_and_echo(tmp_path: Path) -> None:
    run = Run("idle", tmp_path, quiet=True)
    await idle.hold(run, tunnels=50, hold_s=0.1, warm_up=10)
    assert verdicts(run)["all held"]
    assert verdicts(run)["afterwards"]


async def test_every_end_is_seen(tmp_path: Path) -> None:
    run = Run("churn", tmp_path, quiet=True)
    await churn.churn(run, tunnels=5 * len(VISITS), warm_up=len(VISITS))
    assert verdicts(run)["every end as it should be"]
    assert verdicts(run)["counted"]


async def test_names_are_asked_for_beside_others(tmp_path: Path) -> None:
    run = Run("names", tmp_path, quiet=True)
    await names.random_names(run, dials=3)
    if len(run.rows) == 1:
        pytest.skip(run.rows[0].measured)
    assert [row.measured.split()[1] for row in run.rows] == ["ms,", "ms,"]


async def test_floods_of_the_ops_ports_are_floods(tmp_path: Path) -> None:
    run = Run("probes", tmp_path, quiet=True)
    await probes.probes(run, flood_s=0.2)
    assert len(verdicts(run)) == 6
    assert verdicts(run)["counted"]


async def test_random_services_cost_few_tokens(tmp_path: Path) -> None:
    run = Run("services", tmp_path, quiet=True)
    await services.services(run, clients=200)
    found = verdicts(run)
    assert found["tokens asked for"] and found["their token"] and found["afterwards"]


async def test_uploads_do_not_keep_tunnels_out(tmp_path: Path) -> None:
    find_program("h2load")
    run = Run("uploads", tmp_path, quiet=True)
    await uploads.uploads(run, attack_s=1.0, idle=50, quiet_s=0.1)
    assert [row for row in run.rows if "new tunnels" in row.scenario and row.passed]


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_is_whole_frames_and_bounded(flood: Flood) -> None:
    opening, *repetitions = flood.pieces()
    assert opening.startswith(PREFACE)
    assert frames(opening.removeprefix(PREFACE))
    assert len(repetitions) == flood.count
    for number in (0, 1, flood.count - 1):
        assert frames(repetitions[number])


def test_one_byte_frames_are_as_many_as_asked_for() -> None:
    opening, *rest = one_byte_frames(attack.PATH, 2500)
    assert len(frames(opening.removeprefix(PREFACE) + b"".join(rest))) == 4 + 2500


async def test_nobody_beyond_loopback_is_attacked() -> None:
    with pytest.raises(ValueError, match="not on loopback"):
        await attacker.stall(stalls.stalls(attack.PATH)["nothing said"], 80, 1.0, End(host="192.0.2.1"))


def test_a_percentile_is_a_value_that_was_measured() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([float(value) for value in range(1, 101)], 0.99) == 99.0


def test_the_table_wraps_what_is_long() -> None:
    table = render([Row("idle: held", "demanded " * 6, "measured", True), Row("x", "y", "z", False)])
    head, _, *rows = table.splitlines()
    assert head.startswith("scenario")
    assert rows[0].endswith("| PASS")
    assert rows[-1].endswith("| FAIL")
    assert len(rows) == 3

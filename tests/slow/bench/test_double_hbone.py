from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import tools
from bench.double_hbone import Way, cases, compare, memory, standing
from bench.subjects import World
from tests.support.world import find_envoy, find_program


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Way]]:
    find_program("haproxy")
    find_envoy()
    tools.build()
    with standing(World.create(tmp_path_factory.mktemp("world"))) as ways:
        yield ways


def test_a_run_of_each_case(ways: list[Way]) -> None:
    head, *rows = compare(ways, cases(20, 0.1, 1 << 20), 1)
    assert head.split() == ["double", "single", "sidecar", "plain", "envoys"]
    assert [row.split("  ")[0] for row in rows[::2]] == [
        "a new tunnel",
        "a round trip of 64 bytes",
        "a GiB up",
        "a GiB down",
    ]
    assert all("1.00, 1.00" in row for row in rows[1::2]), "double beside itself"


def test_memory_of_those_that_have_an_agent(ways: list[Way]) -> None:
    assert [line.split()[0] for line in memory(ways, 20)] == ["double", "sidecar", "plain", "envoys"]


def test_bulk_is_what_it_says(tmp_path: Path) -> None:
    *_, up, down = cases(1, 1.0, 1 << 30)
    assert sum(map(int, (up.scenario[4], down.scenario[6]))) * 16 == 2 << 30

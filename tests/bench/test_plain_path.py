from __future__ import annotations

from pathlib import Path

from bench.plain_path import BODY_BYTES, GIB, cases, compare
from tests.support.world import find_program


def test_a_run_of_each_case() -> None:
    find_program("h2load")
    find_program("haproxy")
    head, *rows = [line for line in compare(1, BODY_BYTES, gets=50) if not line.startswith("left out: ")]
    assert head.split()[:2] == ["krun", "haproxy"]
    assert [row[:16].strip() for row in rows] == [
        "a GiB up",
        "a GiB down",
        "GET of 64 bytes,",
        "GET of 64 bytes,",
    ]
    assert all("(1.00)" in row for row in rows), "krun beside itself"


def test_the_bulk_cases_are_for_a_gib(tmp_path: Path) -> None:
    up, down, *_ = cases(tmp_path, GIB // 4, 1)
    assert (up.units, down.units) == (0.25, 0.25)
    assert (tmp_path / "body").stat().st_size == BODY_BYTES

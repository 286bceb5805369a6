"""Real starts of hbone to its first byte: few, for the figures need a quiet machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import chisel, first_byte
from bench.subjects import World
from bench.tools import BenchError
from tests.support.world import find_program


@pytest.fixture(autouse=True)
def no_chisel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building it takes a Go and the network."""
    find_program("haproxy")

    def build() -> Path:
        raise BenchError("nothing is built here")

    monkeypatch.setattr(chisel, "build", build)


def test_each_start_comes_to_its_first_byte(tmp_path: Path) -> None:
    found = first_byte.measure(World.create(tmp_path), 2)
    assert set(found) == {"python -c pass, to its exit", "hbone: on the wire", "hbone: at the far end"}
    assert all(len(times) == 2 for times in found.values())
    assert min(found["hbone: on the wire"]) > min(found["python -c pass, to its exit"])


def test_a_command_that_sends_nothing_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_byte, "PATIENCE_S", 0.1)
    monkeypatch.setattr(first_byte, "hbone", lambda _world, _front_end: ["sleep", "10"])
    with pytest.raises(BenchError, match=r"^sleep 10: timed out$"):
        first_byte.measure(World.create(tmp_path), 1)

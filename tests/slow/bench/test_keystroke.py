"""Keystrokes through real ssh, hbone, HAProxy and an agent: few, for the figures need a quiet machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import chisel, keystroke
from bench.tools import BenchError
from tests.support.world import find_program


@pytest.fixture(autouse=True)
def programs() -> None:
    for name in ("ssh", "sshd", "haproxy"):
        find_program(name)


def test_each_key_comes_back_after_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> Path:
        raise BenchError("nothing is built here")

    monkeypatch.setattr(chisel, "build", nothing)
    found = keystroke.measure(tmp_path, 10, 20, turns=1)
    assert set(found) == {"direct", "krun", "envoy"}
    for kinds in found.values():
        assert {kind: [len(turn) for turn in turns] for kind, turns in kinds.items()} == {
            "idle": [10],
            "beside a download": [10],
        }
        assert min(min(turn) for turns in kinds.values() for turn in turns) >= 0.02

"""Keystrokes through real ssh, hbone, HAProxy and an agent: few, for the figures need a quiet machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import keystroke
from tests.support.world import find_program


@pytest.fixture(autouse=True)
def programs() -> None:
    for name in ("ssh", "sshd", "haproxy"):
        find_program(name)


def test_each_key_comes_back_after_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keystroke, "TURNS", 1)
    found = keystroke.measure(tmp_path, 10, 20)
    assert set(found) == {"direct", "krun", "envoy"}
    for kinds in found.values():
        assert {kind: len(times) for kind, times in kinds.items()} == {"idle": 10, "beside a download": 10}
        assert min(min(times) for times in kinds.values()) >= 0.02

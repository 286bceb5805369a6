"""The odd conditions themselves: each is in effect where it can be had, and names tests that are there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.odd.conditions import CONDITIONS
from tests.support.checkout import ROOT

QUICK = sorted(set(CONDITIONS) - {"nobody"})
"""The other one installs a virtual environment."""


@pytest.mark.parametrize("name", CONDITIONS)
def test_the_tests_that_it_names_are_there(name: str) -> None:
    assert [path for path in CONDITIONS[name].tests if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", QUICK)
def test_it_can_be_brought_about(name: str, tmp_path: Path) -> None:
    condition = CONDITIONS[name]
    if missing := condition.lacks():
        pytest.skip(f"takes {missing}")
    with condition.make(tmp_path) as changed:
        command = changed.wrap([sys.executable, "-c", condition.proof])
        assert _run(command, changed.environ).returncode == 0
    if _run([sys.executable, "-c", condition.proof], {"LC_ALL": "C.UTF-8"}).returncode == 0:
        pytest.skip("this machine is like that")


def _run(command: list[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
    told = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **environ}
    return subprocess.run(
        command, env=told, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=60, umask=0o022
    )

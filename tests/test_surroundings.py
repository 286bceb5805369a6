"""What a run of tests is kept from, asked of a run that was started in an odd place."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent.config.settings import ENVIRONMENT
from tests.support.surroundings import SIGNALS, without_settings

ROOT = Path(__file__).parent.parent

UNCHANGEABLE = {signal.SIGKILL, signal.SIGSTOP}
PYTHONS_OWN = {signal.SIGPIPE, signal.SIGXFSZ}
"""Ignored by every Python."""

SAY = f"""\
import json, os, signal
numbers = [n for n in range(1, 32) if n not in {[*map(int, UNCHANGEABLE | PYTHONS_OWN)]}]
ignored = [n for n in numbers if signal.getsignal(n) is signal.SIG_IGN]
blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print(json.dumps({{"ignored": ignored, "blocked": blocked, "environ": dict(os.environ)}}))
"""

ASKED = """\
import os, signal, subprocess, sys

def test_it():
    with open(os.environ["SAID"], "wb") as file:
        subprocess.run([sys.executable, "say.py"], stdout=file, check=True)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
"""


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a child of a test has, whose run was started by a shell that ignores signals, in a full
    environment; the run itself goes on to ignore them."""
    folder = tmp_path_factory.mktemp("asked")
    (folder / "say.py").write_text(SAY)
    (folder / "test_asked.py").write_text(ASKED)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.surroundings", str(folder)]
    ran = subprocess.run(
        ["sh", "-c", 'trap "" HUP INT TERM; exec "$@"', "sh", *command],
        env={
            **without_settings({"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}),
            "PYTHONPATH": str(ROOT),
            "SAID": str(folder / "said"),
            "https_proxy": "http://127.0.0.1:9",
            "HBONE_LOG_LEVEL": "debug",
            "HBONE_TEST_KUBERNETES": "/some/file",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
    )
    assert ran.returncode == 0, ran.stdout
    said: dict[str, object] = json.loads((folder / "said").read_text())
    return said


def test_children_ignore_and_block_no_signal(child: dict[str, object]) -> None:
    assert (child["ignored"], child["blocked"]) == ([], [])


def test_children_have_none_of_the_user_s_settings(child: dict[str, object]) -> None:
    environ = child["environ"]
    assert isinstance(environ, dict)
    assert not {"https_proxy", "HBONE_LOG_LEVEL"} & set(environ)
    assert environ["HOME"] != "/nonexistent"
    assert environ["HBONE_TEST_KUBERNETES"] == "/some/file"


def test_every_variable_of_krun_is_kept_away() -> None:
    names = [name.replace("*", "X") for name in ENVIRONMENT]
    assert without_settings(dict.fromkeys([*names, "PATH"], "x")) == {"PATH": "x"}


def test_this_run_has_none_of_it() -> None:
    assert not [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]

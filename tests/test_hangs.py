"""A test that has failed and hangs in its teardown: what becomes of its run."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.support.loops import Uvloop

pytest_plugins = ["pytester"]

ENDS_AFTER_A_SECOND = """
[pytest]
faulthandler_timeout = 1
faulthandler_exit_on_timeout = true
"""

HANGS_AFTER_A_FAILURE = """
import threading
import pytest

@pytest.fixture
def left_open():
    yield
    threading.Event().wait()

def test_it(left_open):
    assert False
"""

ROOT = Path(__file__).parent.parent

PATIENCE_S = 60


def test_it_ends_with_the_stack_of_what_hangs(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini(ENDS_AFTER_A_SECOND)
    pytester.makepyfile(HANGS_AFTER_A_FAILURE)
    arguments = ("-p", "no:timeout", "-p", "tests.support.hangs")
    ran = pytester.runpytest_subprocess(*arguments, timeout=PATIENCE_S)
    assert ran.ret == 1
    ran.stderr.fnmatch_lines(["Timeout (0:00:01)!", "*test_it_ends_with*.py* in left_open"])


@pytest.mark.filterwarnings("ignore:unclosed resource:ResourceWarning")
def test_a_child_that_a_failed_test_has_left_does_not_hold_the_loop() -> None:
    loop = Uvloop()
    start = asyncio.create_subprocess_exec("sleep", "600", stderr=asyncio.subprocess.PIPE)
    child = loop.run_until_complete(start)
    loop.close()
    _, status = os.waitpid(child.pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL

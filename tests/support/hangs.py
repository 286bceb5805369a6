"""An end for a test that has failed and then hangs while it is taken down.

A pytest plugin. pytest ends the process of a test that takes longer than `faulthandler_timeout` seconds, but
takes that deadline back when the test fails, for a debugger might look at it then. Just then the teardown may
meet what the test has left open, and wait for it where no signal interrupts.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator

import pytest

_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # that of the run; while a test runs, 2 is captured


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    timeout_s = float(item.config.getini("faulthandler_timeout"))
    if timeout_s:
        ends = item.config.getini("faulthandler_exit_on_timeout")
        faulthandler.dump_traceback_later(timeout_s, file=item.config.stash[_stderr], exit=ends)
    # pytest itself takes it back at the end of the test.
    return (yield)

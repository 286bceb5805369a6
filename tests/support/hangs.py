"""An end for a test that has failed and then hangs while it is taken down.

A pytest plugin. pytest ends the process of a test that takes longer than `faulthandler_timeout` seconds, but
takes that deadline back when the test fails, for a debugger might look at it then. Just then the teardown may
meet what the test has left open, and wait for it where no signal interrupts.
"""

from __future__ import annotations

import faulthandler
import os

import pytest

_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # that of the run; while a test runs, 2 is captured


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr])


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Behind pytest's own, which takes the deadline back: sets it anew, for what is left of the test."""
    timeout_s = float(node.config.getini("faulthandler_timeout"))
    if timeout_s and isinstance(node, pytest.Item):
        ends = node.config.getini("faulthandler_exit_on_timeout")
        faulthandler.dump_traceback_later(timeout_s, file=node.config.stash[_stderr], exit=ends)
        # pytest takes it back at the end of the test.

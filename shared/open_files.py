"""How many files the process may have open: as many as the machine allows it."""

from __future__ import annotations

import resource
import sys

from shared import resource_limits

MACOS_MOST = 10_240
"""OPEN_MAX of macOS: its setrlimit(2) refuses more, whatever the hard limit says, which may be none."""


def allow_many() -> int:
    """Raises the soft limit of open files to the hard one and returns it: the usual 1024 is a tenth of what
    is asked of us, and is there only for the sake of select(2), which nothing here calls.

    A child process inherits it. One that may call select(2) has to be started with the limits that we had
    (`resource_limits.as_started`).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if sys.platform == "darwin":
        hard = MACOS_MOST if hard == resource.RLIM_INFINITY else min(hard, MACOS_MOST)
    resource_limits.set_soft(resource.RLIMIT_NOFILE, hard)
    return hard

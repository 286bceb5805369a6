"""How many files the process may have open: as many as the machine allows it."""

from __future__ import annotations

import resource


def allow_many() -> int:
    """Raises the soft limit of open files to the hard one and returns it: the usual 1024 is a tenth of what
    is asked of us, and is there only for the sake of select(2), which nothing here calls.

    A child process inherits it. One that may call select(2) has to be started before.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard

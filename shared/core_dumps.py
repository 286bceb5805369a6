"""Keeps tokens and keys out of core dumps, and from other programs of the same user.

A process that is not dumpable (prctl(2), PR_SET_DUMPABLE) leaves no core, whatever takes cores on the
machine, and its /proc/PID is root's: other programs of its user, such as the app, can neither trace it nor
read its memory, its environment or its open files. It still reads its own /proc/self. A program that it
starts is dumpable again (execve(2)), but inherits the limit on core files.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Mapping

from shared import resource_limits

VARIABLE = "HBONE_CORE_DUMPS"
"""1 leaves the process as it is, for those who debug it."""

MEANING = "1: core dumps of our own process, and debuggers on it, are allowed"
"""Of VARIABLE, for the lists of settings."""

_PR_SET_DUMPABLE = 4


def forbid(environ: Mapping[str, str]) -> None:
    """Makes this process one that leaves no core and that only root can trace, unless VARIABLE says 1. What
    the kernel refuses, as some sandboxes do, stays as it was."""
    if environ.get(VARIABLE, "").strip() == "1":
        return
    with contextlib.suppress(OSError, ValueError):
        resource_limits.set_soft(resource.RLIMIT_CORE, 0)
    # Not `ctypes`, whose import is 2 ms of the 55 that `hbone` takes to its first byte.
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import _ctypes

        library = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # as in dlopen(3)
        prctl = _ctypes.dlsym(library, "prctl")
        _ctypes.call_function(prctl, (_PR_SET_DUMPABLE, 0, 0, 0, 0))

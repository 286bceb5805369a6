"""The limits of this process that we change, and those that the programs that it starts are to have
instead."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

_before: dict[int, int] = {}
"""Soft limits as the process was started with them, by the number of the limit; only those that are
changed."""


def set_soft(which: int, soft: int) -> None:
    """Changes the soft limit `which`, of `resource`. Raises OSError or ValueError where that is not
    allowed."""
    before, hard = resource.getrlimit(which)
    resource.setrlimit(which, (soft, hard))
    _before.setdefault(which, before)


@contextlib.contextmanager
def as_started() -> Iterator[None]:
    """A program that is started within the block has the limits that this process was started with."""
    ours = {which: resource.getrlimit(which) for which in _before}
    try:
        for which, soft in _before.items():
            resource.setrlimit(which, (soft, ours[which][1]))
        yield
    finally:
        for which, limits in ours.items():
            resource.setrlimit(which, limits)

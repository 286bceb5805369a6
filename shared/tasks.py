"""Tasks with a name and an owner: the only place that creates one.

A bare asyncio task is dropped by the garbage collector when nobody holds it, and keeps its exception to
itself. `spawn` holds it until it ends and reports what went wrong under its name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from shared.errors import HboneError

T = TypeVar("T")

log = logging.getLogger("hbone.tasks")

_running: set[asyncio.Task[Any]] = set()


def spawn(coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
    """Runs `coro` as a task called `name`; an exception that nobody awaits is logged under that name."""
    task = asyncio.get_running_loop().create_task(coro, name=name)
    _running.add(task)
    task.add_done_callback(_finished)
    return task


def report(name: str, error: BaseException) -> None:
    """Logs an exception under the name of the task in whose place it was raised."""
    if isinstance(error, HboneError):
        log.debug("task %s ended: %s", name, error)  # foreseeable: its owner reports it
    else:
        log.error("task %s failed: %s: %s", name, type(error).__name__, error, exc_info=error)


def running() -> int:
    """How many spawned tasks have not ended."""
    return len(_running)


def _finished(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if task.cancelled():
        return
    error = task.exception()
    if error is not None:
        report(task.get_name(), error)

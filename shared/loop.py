"""The event loop: uvloop is chosen here and nowhere else."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end on a fresh event loop and returns its result."""
    return uvloop.run(main)

"""The event loop: uvloop is chosen here and nowhere else.

So is when the garbage collector begins: the commands stop it before their first import, as what imports make
stays for good.
"""

from __future__ import annotations

import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

GARBAGE_LOOK = 10_000
"""Objects that have come and not gone before Python looks for cycles among them. A tunnel that is over
leaves none, and Python's own 700 are a few tunnels' worth."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end on a fresh event loop and returns its result. If the collector was stopped, it
    runs from now on. It leaves out what is there by now, also in the collection at the process's end."""
    gc.freeze()  # modules, functions and types, which would be looked at each time
    gc.set_threshold(GARBAGE_LOOK)
    gc.enable()
    return uvloop.run(main)

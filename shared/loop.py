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


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end on a fresh event loop and returns its result. If the collector was stopped, it
    runs from now on, and leaves out what is there by now, also in the collection at the process's end."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    return uvloop.run(main)

"""The event loop that everything runs on."""

from __future__ import annotations

import asyncio
import gc

import pytest
import uvloop

from shared import loop
from shared.errors import UsageError


def test_it_is_uvloop_and_returns_the_result() -> None:
    async def which() -> type[asyncio.AbstractEventLoop]:
        return type(asyncio.get_running_loop())

    assert loop.run(which()) is uvloop.Loop


def test_cycles_are_looked_for_now_and_then_only() -> None:
    async def threshold() -> int:
        return gc.get_threshold()[0]

    assert loop.run(threshold()) == loop.GARBAGE_LOOK


def test_an_error_comes_out_as_it_is() -> None:
    async def fail() -> None:
        raise UsageError("no such flag")

    with pytest.raises(UsageError, match="no such flag"):
        loop.run(fail())


def test_a_stopped_collector_runs_again_and_leaves_out_what_was_there() -> None:
    async def look() -> tuple[bool, int]:
        return gc.isenabled(), gc.get_freeze_count()

    gc.disable()
    try:
        runs, left_out = loop.run(look())
    finally:
        gc.enable()
        gc.unfreeze()
    assert runs
    assert left_out > 0

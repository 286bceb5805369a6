"""The event loop that everything runs on."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from shared import loop
from shared.errors import UsageError


def test_it_is_uvloop_and_returns_the_result() -> None:
    async def which() -> type[asyncio.AbstractEventLoop]:
        return type(asyncio.get_running_loop())

    assert loop.run(which()) is uvloop.Loop


def test_an_error_comes_out_as_it_is() -> None:
    async def fail() -> None:
        raise UsageError("no such flag")

    with pytest.raises(UsageError, match="no such flag"):
        loop.run(fail())

"""Tests of this folder run on both event loops: uvloop, which serves, and asyncio's own, which is pickier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.support.loops import Uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": Uvloop}

"""What runs in production on uvloop is tested there, and on asyncio's own loop, which is pickier. Tests that
start processes do that once: those choose their loop themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tests.hbone.descriptors import Descriptors
from tests.support.loops import Uvloop

ON_BOTH_LOOPS = ("test_stdio.py", "test_front_end.py", "test_metadata.py")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": Uvloop}
    if item.path.name in ON_BOTH_LOOPS:
        factories["asyncio"] = asyncio.new_event_loop
    return factories


@pytest.fixture
def fds() -> Iterator[Descriptors]:
    opened = Descriptors()
    yield opened
    opened.close_all()

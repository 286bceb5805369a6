"""What holds for every test: the event loop, and how many examples hypothesis tries.

Async tests run on uvloop, which serves in production. A folder's own conftest.py may choose otherwise for the
tests below it, and a test that names its loop itself is left alone.

HYPOTHESIS_PROFILE=deep tries 20,000 instead of 50 each, which takes minutes. No profile has a deadline: a
busy machine is no reason to fail.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from hypothesis import settings

from tests.support.loops import Uvloop
from tests.support.network import unanswering
from tests.support.tcp_peer import TcpServer
from tests.support.wall_clock import Clock

pytest_plugins = ["tests.support.surroundings", "tests.support.secrets_search", "tests.support.hangs"]

settings.register_profile("fast", max_examples=50, deadline=None)
settings.register_profile("deep", max_examples=20_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": Uvloop}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share what a module or a package has started run in one worker of pytest-xdist: else each
    worker starts its own."""
    for item in items:
        if isinstance(item, pytest.Function) and (group := _shared(item)):
            item.add_marker(pytest.mark.xdist_group(group))


def _shared(test: pytest.Function) -> str:
    """A name for what the test shares with others of its module or package; "": nothing."""
    given = test.callspec.params if hasattr(test, "callspec") else {}
    fixtures = [definitions[-1] for definitions in test._fixtureinfo.name2fixturedefs.values()]
    shared = [fixture for fixture in fixtures if fixture.scope in ("module", "package")]
    module = test.nodeid.partition("::")[0]
    place = min((one.baseid if one.scope == "package" else module for one in shared), key=len, default="")
    return " ".join([place, *(str(given[one.argname]) for one in shared if one.argname in given)])


@pytest.fixture
async def target() -> AsyncIterator[TcpServer]:
    """What a tunnel leads to: a server that the test plays."""
    async with TcpServer.listening() as target:
        yield target


@pytest.fixture
def full_port() -> Iterator[int]:
    """A port that neither accepts nor refuses."""
    with unanswering() as port:
        yield port


@pytest.fixture
def clock() -> Clock:
    """The wall clock, which stands still at the time of day."""
    return Clock(time.time())

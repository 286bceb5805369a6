"""What several tests of krun start from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from agent.config.settings import Settings
from shared.address import Address
from tests.support.http2_peer import Http2Peer
from tests.support.krun_port import KrunPort
from tests.support.loops import Uvloop
from tests.support.tcp_peer import TcpServer

on_both_loops = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
"""Marks a test of child processes: the loops start and collect them in different ways."""


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]] | None:
    marker = item.get_closest_marker("asyncio")
    if item.path.name == "test_launcher.py" or (marker is not None and "loop_factories" in marker.kwargs):
        return {"asyncio": asyncio.new_event_loop, "uvloop": Uvloop}
    return None  # as for all tests


@pytest.fixture
async def app() -> AsyncIterator[TcpServer]:
    """The app, which the test plays."""
    async with TcpServer.listening() as app:
        yield app


@pytest.fixture
def settings(app: TcpServer) -> Settings:
    """Of a krun before an app of HTTP/1.1, unless a module has its own."""
    return Settings(app=Address("127.0.0.1", app.port), app_protocol="http1")


@pytest.fixture
async def krun(settings: Settings) -> AsyncIterator[KrunPort]:
    async with KrunPort.serving(settings) as krun:
        yield krun


@pytest.fixture
async def peer(krun: KrunPort) -> AsyncIterator[Http2Peer]:
    """A client of `krun`."""
    async with Http2Peer.connected(krun.port) as peer:
        yield peer

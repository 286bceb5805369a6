"""What several tests of krun start from."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.http2_peer import Http2Peer
from tests.support.krun_port import KrunPort
from tests.support.tcp_peer import TcpServer


@pytest.fixture
async def app() -> AsyncIterator[TcpServer]:
    """The app, which the test plays."""
    async with TcpServer.listening() as app:
        yield app


@pytest.fixture
async def peer(krun: KrunPort) -> AsyncIterator[Http2Peer]:
    """A client of the `krun` of the test's module."""
    async with Http2Peer.connected(krun.port) as peer:
        yield peer

"""What several tests of krun start from."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.http2_peer import Http2Peer
from tests.support.krun_port import KrunPort
from tests.support.tcp_peer import TcpServer


@pytest.fixture
def full_port() -> Iterator[int]:
    """A port that answers no connection any more: its queue is full."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()[1]
        for client in waiting:
            client.close()


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

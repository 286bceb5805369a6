"""What several tests of krun start from."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest


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

"""A leg on a real socket and a bare one at the other end, for the tests that begin with them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared.net.legs.tcp import TcpLeg
from tests.shared.net.loopback import Peer, dialled


@pytest.fixture
async def _ends() -> AsyncIterator[tuple[TcpLeg, Peer]]:
    async with dialled() as ends:
        yield ends


@pytest.fixture
def leg(_ends: tuple[TcpLeg, Peer]) -> TcpLeg:
    return _ends[0]


@pytest.fixture
def peer(_ends: tuple[TcpLeg, Peer]) -> Peer:
    return _ends[1]

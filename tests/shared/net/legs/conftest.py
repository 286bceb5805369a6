"""What several tests begin with: a leg on a real socket and a bare one at the other end; certificates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.credentials.certificates.authority import Authority, KeyPair
from shared.net.legs.tcp import TcpLeg
from tests.shared.net.legs.mesh_server import CLIENT, SERVER, TRUST_DOMAIN
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


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create(TRUST_DOMAIN)


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> KeyPair:
    return authority.issue(CLIENT)


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> Path:
    authority.write(tmp_path, authority.issue(SERVER))
    return tmp_path

"""Both kinds of krun's sshd with real clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.config.ssh_settings import SshServer
from agent.ssh.sshd import Sshd
from tests.support.ssh_clients import KINDS, Client, Log, serving


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> SshServer:
    found: SshServer = request.param
    return found


@pytest.fixture
async def world(kind: SshServer, tmp_path: Path) -> AsyncIterator[tuple[Sshd, Client]]:
    async with serving(kind, tmp_path) as world:
        yield world


@pytest.fixture
def sshd(world: tuple[Sshd, Client]) -> Sshd:
    return world[0]


@pytest.fixture
def client(world: tuple[Sshd, Client]) -> Client:
    return world[1]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    return Log(caplog)

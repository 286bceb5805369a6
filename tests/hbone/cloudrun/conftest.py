"""What the stand-in's tests share: certificates, keys, and a front end between a container and a client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from hbone.cloudrun.limits import FrontEndLimits
from tests.hbone.cloudrun.world import Credentials
from tests.support.http2_peer import Http2Peer, Service


@pytest.fixture(scope="session")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Credentials.make(tmp_path_factory.mktemp("cloudrun"))


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    """The container."""
    async with Service.listening() as service:
        yield service


@pytest.fixture
def limits() -> FrontEndLimits:
    """The front end's; a test's own by `parametrize`."""
    return FrontEndLimits()


@pytest.fixture
async def client(
    credentials: Credentials, service: Service, limits: FrontEndLimits
) -> AsyncIterator[Http2Peer]:
    """Of a front end before `service`."""
    async with credentials.front_end(service.port, limits) as port, credentials.client(port) as client:
        yield client

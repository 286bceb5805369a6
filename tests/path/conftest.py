"""What holds for the tests of the whole path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.path.app import App, echo
from tests.path.programs import MUCH_BYTES
from tests.support.network_namespace import Network, NoNetworkError
from tests.support.network_namespace import network as own_network
from tests.support.world import INBOUNDS, World, running


@pytest.fixture(autouse=True)
def no_large_leftovers(tmp_path: Path) -> Iterator[None]:
    """pytest keeps the folders of three runs, which would be some gigabytes."""
    yield
    for file in tmp_path.iterdir():
        if file.stat().st_size >= MUCH_BYTES:
            file.unlink()


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """A network of the test's own, without name servers."""
    with ExitStack() as block:
        try:
            entered = block.enter_context(own_network(tmp_path))
        except NoNetworkError as error:
            pytest.skip(str(error))
        yield entered


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App(echo) as app:
        yield app


@pytest.fixture(scope="module", params=INBOUNDS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, app: App
) -> Iterator[World]:
    """The whole mesh before `app`, once with each mTLS end."""
    with running(tmp_path_factory.mktemp(request.param), inbound=request.param, app=app.address) as world:
        yield world

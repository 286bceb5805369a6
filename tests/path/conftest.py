"""What holds for the tests of the whole path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.path.app import App, echo
from tests.path.programs import MUCH_BYTES
from tests.support.network_namespace import Network, NoNetworkError
from tests.support.network_namespace import network as own_network


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
    try:
        made = own_network(tmp_path)
        entered = made.__enter__()
    except NoNetworkError as error:
        pytest.skip(str(error))
    try:
        yield entered
    finally:
        made.__exit__(None, None, None)


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App(echo) as app:
        yield app

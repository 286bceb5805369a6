"""Forwards that break and come back, take their time, or carry much."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.path.app import App
from tests.support.forwards import patient_echo
from tests.support.network import free_port
from tests.support.world import World, running


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App(patient_echo) as app:
        yield app


@pytest.fixture(scope="module")
def allowed() -> int:
    """A port that krun may listen on."""
    return free_port()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, app: App, allowed: int) -> Iterator[World]:
    environ = {"PORT_ECHO": str(app.address), "HBONE_REMOTE_PORTS": str(allowed)}
    with running(tmp_path_factory.mktemp("world"), inbound="none", app=app.address, environ=environ) as world:
        yield world


@pytest.fixture(autouse=True)
def token_source(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", world.metadata)

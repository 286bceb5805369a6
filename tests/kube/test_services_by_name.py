"""`hbone register` and a real API server: the service is found by its name, by who may look."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hbone.services.found_service import FoundService
from hbone.services.lookup import Lookup
from hbone.services.named_service import ServiceName
from shared.cluster.service_annotations import ORIGINAL_LABEL, URL
from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
from shared.errors import EXIT_OK, UnavailableError
from tests.hbone.commands import output_of
from tests.support.api_server import NAMESPACE, RealApiServer, access, kubeconfig

HELLO = "https://hello-123456789012.us-central1.run.app"
SERVICES = f"/api/v1/namespaces/{NAMESPACE}/services"
NAMED = ServiceName("hello", NAMESPACE)


class World:
    """The server, and a home without gcloud."""

    def __init__(self, server: RealApiServer, folder: Path) -> None:
        self.server = server
        self.api = KubernetesApi(access(server, server.admin))
        self.file = folder / "kubeconfig"
        self.home = folder / "home"
        self.home.mkdir()

    def lookup(self, token: str | None = None) -> Lookup:
        self.file.write_text(kubeconfig(self.server, token or self.server.admin))
        told = {"KUBECONFIG": str(self.file), "HOME": str(self.home), "PATH": "/nonexistent"}
        return Lookup(told | {"HBONE_CACHE": "none"})

    async def names(self) -> list[str]:
        """Those of the namespace; other tests have others."""
        return [name for name in await self.lookup().names() if name.endswith(f".{NAMESPACE}")]

    async def make(self, path: str, kind: str, version: str, spec: Any, **about: Any) -> None:
        told = {"namespace": NAMESPACE, **about}
        await self.api.ask(
            "POST", path, {"apiVersion": version, "kind": kind, "metadata": told, "spec": spec}
        )


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(RealApiServer.running(), tmp_path)
    asyncio.run(world.api.ask("DELETE", SERVICES))  # what tests before have left
    yield world
    asyncio.run(world.api.ask("DELETE", SERVICES))


PLAIN = {"ports": [{"port": 80}]}


async def test_a_registered_service_is_found(world: World) -> None:
    lookup = world.lookup()
    environ = {"KUBECONFIG": str(world.file)}
    ended = await output_of("register", HELLO, "--no-wait", environ=environ)
    assert ended.code == EXIT_OK, ended
    found = FoundService(HELLO, f"Service {NAMESPACE}/hello of context test")
    assert await lookup.find(NAMED) == found
    assert await lookup.find(ServiceName("hello")) == found
    assert await world.names() == [f"hello.{NAMESPACE}"]


async def test_the_original_s_label(world: World) -> None:
    name = "hello-abcdefghij-uc"
    await world.make(SERVICES, "Service", "v1", PLAIN, name=name, labels={ORIGINAL_LABEL: "hello"})
    found = await world.lookup().find(ServiceName("hello"))
    assert (found.url, found.place) == (
        f"https://{name}.a.run.app",
        f"Service {NAMESPACE}/{name} of context test",
    )


async def test_a_service_that_stays_in_the_cluster(world: World) -> None:
    await world.make(SERVICES, "Service", "v1", PLAIN, name="hello")
    text = f"Service {NAMESPACE}/hello of context test has no annotation {URL}"
    with pytest.raises(UnavailableError, match=text):
        await world.lookup().find(NAMED)
    assert await world.names() == []


async def test_who_may_not_look(world: World) -> None:
    with pytest.raises(
        UnavailableError, match=r"answered 403 Forbidden: .* the verb get on services in name"
    ):
        await world.lookup(world.server.forbidden).find(NAMED)
    assert await world.lookup(world.server.forbidden).names() == []
    with pytest.raises(UnavailableError, match=f"context test has no Service {NAMESPACE}/hello"):
        await world.lookup().find(NAMED)

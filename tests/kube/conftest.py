"""The API server that these tests share. They are collected by `make test-kube` only."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import yaml

from tests.kube import build
from tests.kube.objects import Client, Cluster, of_kind, rendered
from tests.mesh.objects import Object, Objects
from tests.support.api_server import REAL, RealApiServer

collect_ignore_glob = [] if REAL in os.environ else ["test_*.py"]


@pytest.fixture
def server() -> RealApiServer:
    """etcd and kube-apiserver."""
    return RealApiServer.running()


class Hands:
    """What an administrator does there, from within an event loop."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def apply(self, *objects: Object) -> None:
        await asyncio.to_thread(self._objects.apply, objects)

    async def delete(self, *objects: Object) -> None:
        await asyncio.to_thread(self._objects.delete, objects)

    async def status(self, *objects: Object) -> None:
        """What a controller says of them, such as a load balancer's."""
        await asyncio.to_thread(self._objects.status, objects)

    async def get(self, path: str) -> dict[str, Any] | None:
        return await asyncio.to_thread(self._objects.get, path)


@pytest.fixture
def hands(server: RealApiServer) -> Hands:
    return Hands(Objects(server, server.admin))


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The API server, with the custom resources that deploy/ may have, its namespaces and its account."""
    running = RealApiServer.running()
    cluster = Cluster(Client(running, running.admin))
    definitions = [
        each for path in build.custom_resources() for each in yaml.safe_load_all(path.read_text()) if each
    ]
    cluster.define(definitions)
    for name in ("istio-system", "demo", "other"):
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    for each in of_kind(rendered("overlays/gke"), "Namespace", "ServiceAccount"):
        cluster.apply(each)
    return cluster

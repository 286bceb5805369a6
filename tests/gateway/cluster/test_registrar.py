"""Services registered with the mesh, whatever is in the way for a while."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.cluster import registrar
from gateway.cluster.api_server import ApiServer
from gateway.cluster.registrar import Registrar
from shared.address import Address
from shared.cluster.service_annotations import URL
from tests.support.cluster_process import until
from tests.support.scripted_api import access_to, scripted_api

GATEWAYS = [Address("10.0.0.5", 15443)]
ENTRY = "/apis/networking.istio.io/v1/namespaces/demo/serviceentries/hbone-hello"


def service(**annotations: str) -> dict[str, Any]:
    about = {"name": "hello", "namespace": "demo", "uid": "u-1"}
    told = {URL: "https://hello.a.run.app", **annotations}
    return {
        "kind": "Service",
        "metadata": {**about, "annotations": told},
        "spec": {"ports": [{"name": "http", "port": 80}]},
    }


async def test_what_was_in_the_way_and_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owners were told to remove it. It has no label of ours, so no watch tells that they have."""
    monkeypatch.setattr(registrar, "OBSTACLE_S", 0.1)
    told: list[None] = []
    async with scripted_api() as server:
        api = await ApiServer.connected(access_to(server, tmp_path))
        registers = Registrar(api, "cluster.local", lambda: told.append(None), lambda _: None)
        theirs = {"metadata": {"name": "hbone-hello", "namespace": "demo"}, "spec": {"hosts": ["theirs"]}}
        server.objects[ENTRY] = theirs
        registers.want({("demo", "hello"): service()}, GATEWAYS)
        registers.start()
        try:
            await until(lambda: registers.obstacles)
            assert "is somebody else's" in registers.obstacles["demo", "hello"]
            assert server.objects[ENTRY] is theirs
            del server.objects[ENTRY]
            await until(lambda: ENTRY in server.objects and not registers.obstacles)
            assert server.objects[ENTRY]["spec"]["hosts"] == ["hello.demo.svc.cluster.local"]
            assert len(told) == 2, "that it is in the way, and that it is not"
        finally:
            registers.stop()
            await api.close()
            await asyncio.sleep(0)


async def test_a_fault_of_ours_is_told(tmp_path: Path) -> None:
    """Whoever owns it ends then, for the container to be started again: nothing would be registered any more,
    and nobody would see it."""
    ended: list[str] = []

    def told(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            ended.append(task.get_name())

    async with scripted_api() as server:
        api = await ApiServer.connected(access_to(server, tmp_path))
        registers = Registrar(api, "cluster.local", lambda: None, told)
        registers.start()
        try:
            registers.want({("demo", "hello"): {"metadata": {"uid": "u-1"}}}, GATEWAYS)
            await until(lambda: ended)
            assert ended == ["register services"]
        finally:
            registers.stop()
            await api.close()
            await asyncio.sleep(0)

"""What objects are told, and how often."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.cluster import object_status
from gateway.cluster.api_server import ApiServer
from gateway.cluster.object_status import ObjectStatus, Status
from gateway.cluster.object_watch import Kind
from gateway.cluster.service_routes import ObjectName
from shared.cluster.service_annotations import STATUS
from shared.tasks import spawn
from tests.support.cluster_process import until
from tests.support.scripted_api import access_to, scripted_api

KINDS = {"Service": Kind("Service", "v1", "services")}


async def test_an_object_that_flips_is_told_so_only_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time makes an Event, which etcd keeps for an hour."""
    monkeypatch.setattr(object_status, "PAUSE_S", 0.0)
    monkeypatch.setattr(object_status, "AGAIN_S", 0.1)
    place = "/api/v1/namespaces/demo/services"
    flips = ObjectName("Service", "demo", "flips")
    async with scripted_api() as server:

        def told(name: str) -> str:
            found = server.objects.get(f"{place}/{name}", {"metadata": {"annotations": {STATUS: ""}}})
            return str(found["metadata"]["annotations"][STATUS])

        def tells() -> int:
            return [path for method, path, _ in server.asked if method == "PATCH"].count(f"{place}/flips")

        api = await ApiServer.connected(access_to(server, tmp_path))
        status = ObjectStatus(api, KINDS, lambda: True, "us")
        task = spawn(status.run(), name="tell objects")
        try:
            for number in range(20):
                text = f"refused: {number}"
                other = ObjectName("Service", "demo", f"other-{number}")
                status.want({flips: Status(text, False, "u-1", "1"), other: Status(text, False, "u-2", "1")})
                await until(lambda other=other, text=text: told(other.name) == text)
            assert tells() == object_status.MOST_TOLD, "and others are told at once"
            monkeypatch.setattr(object_status, "TOLD_S", 0.0)
            await until(lambda: told("flips") == "refused: 19")
            assert tells() == object_status.MOST_TOLD + 1, "what is so in the end"
        finally:
            task.cancel()
            await asyncio.wait({task})
            await api.close()

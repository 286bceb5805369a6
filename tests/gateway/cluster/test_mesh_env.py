"""mesh-env, kept also when somebody else writes to it at the same moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.cluster import mesh_env
from gateway.cluster.api_server import ApiServer
from gateway.cluster.mesh_env import MeshEnv
from shared.tasks import spawn
from tests.support.cluster_process import until
from tests.support.scripted_api import access_to, scripted_api, status

PLACE = "/api/v1/namespaces/istio-system/configmaps"
NOBODY = "127.0.0.1:1"


async def test_a_conflict_does_not_wait_for_the_next_look(tmp_path: Path) -> None:
    """Somebody took a key over between our look and our writing: the next look leaves it to them."""
    async with scripted_api() as server:
        server.answers.extend(status(404, "NotFound") for _ in range(4))  # Istio's ConfigMaps, and mesh-env
        server.answers.append(status(409, "Conflict"))
        api = await ApiServer.connected(access_to(server, tmp_path))
        kept = MeshEnv(api, NOBODY, lambda _: "10.0.0.1", lambda: True)
        task = spawn(kept.run(), name="keep mesh-env")
        try:
            await until(lambda: f"{PLACE}/mesh-env" in server.objects)
            assert server.objects[f"{PLACE}/mesh-env"]["data"]["MCON_ADDR"] == "10.0.0.1"
            assert kept.failed == 1
        finally:
            task.cancel()
            await asyncio.wait({task})
            await api.close()


@pytest.mark.parametrize("mesh", ["a: 2026-99-99", "a: [", "- a", "trustDomain: [", "!!python/none x"])
def test_a_mesh_that_cannot_be_read_has_no_trust_domain(mesh: str) -> None:
    assert mesh_env._trust_domain({"mesh": mesh}) == ""

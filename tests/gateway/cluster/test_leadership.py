"""Who writes: never two, also when the API server answers late or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from gateway.cluster import leadership
from gateway.cluster.api_server import ApiServer
from gateway.cluster.leadership import Leadership
from shared.tasks import spawn
from tests.support.scripted_api import access_to, scripted_api, status
from tests.support.tcp_peer import PATIENCE_S

PARTS = 10
"""Of a second, as which each of them counts here."""


async def test_a_holder_whose_server_is_silent_stops_before_others_may_take_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LEASE_S", "RENEW_S", "LOOK_S", "MARGIN_S"):
        monkeypatch.setattr(leadership, name, getattr(leadership, name) / PARTS)
    loop = asyncio.get_running_loop()
    changes: list[tuple[bool, float]] = []
    told = asyncio.Event()

    def changed(held: bool) -> None:
        changes.append((held, loop.time()))
        server.hangs = True
        if not held:
            told.set()

    async with scripted_api() as server:
        server.answers.append(status(404, "NotFound"))
        server.answers.append(web.json_response({"metadata": {"resourceVersion": "1"}, "spec": {}}))
        api = await ApiServer.connected(access_to(server, tmp_path))
        task = spawn(Leadership(api, "istio-system", "hgate", "us", changed).run(), name="seek the lease")
        try:
            async with asyncio.timeout(PATIENCE_S):
                await told.wait()
        finally:
            task.cancel()
            await asyncio.wait({task})
            await api.close()
    (_, first), (_, last) = changes
    # In whole seconds: 15 of the lease less 3 of margin.
    assert last - first < leadership.LEASE_S - leadership.MARGIN_S / 2

"""Double HBONE through the whole path: much of it, many at once, and none for a while."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator

import pytest

from tests.path.ambient_world import AUTHORITY, AmbientWorld, running
from tests.path.app import App
from tests.path.programs import MUCH_BYTES
from tests.support.double_hbone import PING_S, DoubleTunnel
from tests.support.forwards import patient_echo
from tests.support.world import PATIENCE_S, count, times

AT_ONCE = 500
OUTERS = 5
ROUND_BYTES = 10_000
PIECE_BYTES = 1 << 20


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory, app: App) -> Iterator[AmbientWorld]:
    app.behave = patient_echo
    with running(tmp_path_factory.mktemp("ambient"), app.address) as way:
        yield way


async def came_back(tunnel: DoubleTunnel, size: int) -> str:
    """The digest of the next `size` bytes."""
    digest = hashlib.sha256()
    for at in range(0, size, PIECE_BYTES):
        digest.update(await tunnel.stream.read(min(PIECE_BYTES, size - at)))
    return digest.hexdigest()


async def test_64_mib_each_way_at_once(way: AmbientWorld) -> None:
    body = os.urandom(MUCH_BYTES)
    async with way.ztunnel() as ztunnel, ztunnel.tunnel(AUTHORITY) as tunnel:
        _, digest = await asyncio.gather(tunnel.stream.send(body), came_back(tunnel, len(body)))
        tunnel.stream.end()
        assert await tunnel.stream.rest() == b""
    assert digest == hashlib.sha256(body).hexdigest()


async def test_500_at_once_over_a_few_connections(way: AmbientWorld) -> None:
    before = times(way.gateway.process, "connection complete")
    all_there = asyncio.Barrier(AT_ONCE)

    async def one() -> bool:
        body = os.urandom(ROUND_BYTES)
        async with ztunnel.tunnel(AUTHORITY) as tunnel:
            await all_there.wait()
            await tunnel.stream.send(body)
            tunnel.stream.end()
            return await tunnel.stream.rest() == body

    async with asyncio.timeout(PATIENCE_S), way.ztunnel() as ztunnel:
        assert all(await asyncio.gather(*(one() for _ in range(AT_ONCE))))
        assert len(ztunnel.outers) == OUTERS
    await asyncio.to_thread(count, way.gateway.process, "connection complete", before + AT_ONCE)


async def test_a_silent_tunnel_is_kept_by_pings(way: AmbientWorld) -> None:
    async with way.ztunnel() as ztunnel, ztunnel.tunnel(AUTHORITY) as tunnel:
        await asyncio.sleep(2.5 * PING_S)  # the silence itself is what is tested
        (outer,) = ztunnel.outers
        assert outer.peer.pings_answered == tunnel.inner.peer.pings_answered == 2
        await tunnel.stream.send(b"still there?")
        assert await tunnel.stream.read(12) == b"still there?"

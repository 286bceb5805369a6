"""All origins: the table, what is remembered of those that fail, the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from pathlib import Path

import pytest

from shared.errors import DialError
from shared.net.pool import pool
from shared.tasks import spawn
from tests.shared.conftest import Credentials
from tests.shared.http2.dialogue import POST
from tests.shared.net.loopback import PATIENCE_S, until
from tests.shared.net.pooled import gated, h2c, pooled, serving
from tests.support.http2_peer import Service
from tests.support.metadata_server import closed_port
from tests.support.world import free_port

CONNECTIONS = 3

# The table of origins.


async def test_an_origin_is_not_forgotten_while_somebody_is_about_to_dial_it() -> None:
    """The last connection goes while an opener waits for room: it dials for the pool that the table knows."""
    async with serving(streams_per_connection=1, connections_per_origin=CONNECTIONS) as (world, origin):
        waiting = await world.wait_behind(origin, CONNECTIONS)
        for peer in world.service.connections:
            peer.drop()
        stream = await waiting
        assert world.connections(origin) == [stream.connection]


async def test_a_stream_without_waiting_needs_a_connection_with_room() -> None:
    async with serving(streams_per_connection=2) as (world, origin):
        assert world.pool.open_now(origin, POST) is None
        assert world.pool.origins == {}
        first = await world.open(origin)
        second = world.pool.open_now(origin, POST)
        assert second is not None
        assert second.connection is first.connection
        assert world.pool.open_now(origin, POST) is None


async def test_close() -> None:
    async with serving(streams_per_connection=1, connections_per_origin=CONNECTIONS) as (world, origin):
        stream = await world.open(origin)
        await world.pool.close(0.0)
        assert stream.over
        await until(lambda: not world.pool.origins)
        assert (world.opened, world.closed()) == (1, {"stopped": 1})
        with pytest.raises(DialError, match="we are stopping"):
            await world.open(origin)
        assert world.pool.origins == {}


async def test_close_tells_who_waits_for_a_dial(credentials: Credentials) -> None:
    async with Service.listening() as service, gated(service.port) as gate, pooled() as world:
        waiting = [spawn(world.open(gate.origin(credentials)), name="waits") for _ in range(2)]
        await until(lambda: gate.waiting)
        await world.pool.close(0.0)
        for task in waiting:
            with pytest.raises(DialError, match="we are stopping"):
                await task
        assert world.opened == 0


async def test_close_tells_who_waits_for_room() -> None:
    async with serving(streams_per_connection=1, connections_per_origin=CONNECTIONS) as (world, origin):
        waiting = await world.wait_behind(origin, CONNECTIONS)
        await world.pool.close(0.0)
        with pytest.raises(DialError, match="we are stopping"):
            await waiting


async def test_close_leaves_no_byte_behind() -> None:
    """What a tunnel has left for a service that reads slowly still arrives."""
    async with Service.listening() as service, pooled() as world:
        stream = await world.open(h2c(service.port))
        asked = await service.request()
        asked.window_held = True
        data = os.urandom(1 << 20)
        stream.write(data)
        assert stream.waiting, "more than the window takes"
        stream.write_eof()
        stream.close()
        closing = spawn(world.pool.close(PATIENCE_S), name="close")
        await until(lambda: len(asked.data) >= 65535)
        assert not closing.done()
        asked.release_window()
        assert await asked.rest() == data
        await closing
        assert world.pool.origins == {}
        assert asked.peer.goaway


async def test_close_waits_for_no_one_beyond_its_time() -> None:
    async with Service.listening() as service, pooled() as world:
        stream = await world.open(h2c(service.port))
        await service.request()
        await world.pool.close(0.05)
        assert stream.over
        await until(lambda: not world.pool.origins)


async def test_a_drain_lets_streams_finish() -> None:
    async with serving() as (world, origin):
        stream = await world.open(origin)
        asked = await world.service.request()
        world.pool.drain()
        with pytest.raises(DialError, match="we are stopping"):
            await world.open(origin)
        asked.respond(200)
        assert await stream.response(PATIENCE_S) == 200
        stream.write(b"last words")
        stream.write_eof()
        assert await asked.rest() == b"last words"
        asked.end()
        await until(lambda: not world.pool.origins)
        assert world.closed() == {"stopped": 1}


async def test_a_drain_closes_idle_connections_at_once() -> None:
    async with Service.listening() as service, pooled() as world:
        (await world.open(h2c(service.port))).abort()
        world.pool.drain()
        await until(lambda: not world.pool.origins)
        assert service.connections[0].goaway


# What is remembered of origins that fail.


async def test_failures_are_remembered_without_an_origin() -> None:
    async with pooled(chance=1.0) as world:
        origin = h2c(closed_port())
        with pytest.raises(DialError):
            await world.open(origin)
        await until(lambda: not world.pool.origins)
        with pytest.raises(DialError, match=r"the next attempt is due in 0\.1 s"):
            await world.open(origin, 0.01)
        assert world.counts.dials_failed_total == 1
        assert world.pool.origins == {}


async def test_only_so_many_failures_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_FAILING", 5)
    async with pooled(chance=0.0) as world:
        for _ in range(20):
            with pytest.raises(DialError):
                await world.open(h2c(closed_port()))
        assert len(world.pool._backoffs) == 5


async def test_a_success_is_not_remembered() -> None:
    async with pooled(chance=0.0) as world:
        port = closed_port()
        with pytest.raises(DialError):
            await world.open(h2c(port))
        async with Service.listening(port=port):
            stream = await world.open(h2c(port))
            await until(lambda: stream.connection.speaks_http2)
            stream.abort()
            world.pool.drain()
            await until(lambda: not world.pool.origins)
        assert world.pool._backoffs == {}


# A peer that is not ours.


@pytest.mark.skipif(shutil.which("nghttpd") is None, reason="nghttpd is not installed")
async def test_nghttpd(tmp_path: Path) -> None:
    """Opens, fills, spares, drains and closes against nghttp2's own server."""
    (tmp_path / "file").write_bytes(b"content")
    port = free_port()
    arguments = ["--no-tls", "-a", "127.0.0.1", "-d", str(tmp_path), str(port)]
    server = await asyncio.create_subprocess_exec("nghttpd", *arguments)
    try:
        async with pooled(streams_per_connection=10) as world:
            origin = h2c(port)
            await listening(port)
            headers = [
                (b":method", b"GET"),
                (b":scheme", b"http"),
                (b":authority", b"a"),
                (b":path", b"/file"),
            ]
            for _ in range(3):
                streams = [await world.pool.of(origin).open(headers, PATIENCE_S) for _ in range(25)]
                for stream in streams:
                    stream.write_eof()
                    assert await stream.response(PATIENCE_S) == 200
            assert 3 <= world.opened <= 4
            assert all(connection.heard_at for connection in world.connections(origin))
            world.pool.origins[origin].connections[0].ping()
            await world.pool.close(PATIENCE_S)
            assert world.pool.origins == {}
            assert world.closed() == {"stopped": world.opened}
    finally:
        server.terminate()
        await server.wait()


async def listening(port: int) -> None:
    """Returns when somebody listens there."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.01)

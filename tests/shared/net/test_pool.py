"""The pool against servers played by h2: who dials, who waits, which connection a stream gets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from h2.connection import H2Connection
from h2.settings import SettingCodes

from shared.errors import DialError, StreamResetError, UpstreamError
from shared.net.address import Address
from shared.net.connection import Connection
from shared.net.dial import Origin
from shared.net.pool import CONNECTIONS_PER_ORIGIN, IDLE_S, OriginPool, Pool
from shared.net.stream import Stream
from shared.net.tls import server_context
from shared.tasks import spawn
from tests.shared.net.conftest import Credentials
from tests.shared.net.hasty_loop import hasty
from tests.shared.net.loopback import PATIENCE_S, until
from tests.shared.wire.dialogue import POST, goaway, settings
from tests.support.http2_peer import Http2Peer, Service
from tests.support.metadata_server import closed_port

LONG_S = 3600.0


def h2c(port: int) -> Origin:
    return Origin("http", "service", Address("127.0.0.1", port))


class Pooled:
    """A pool with its counters."""

    def __init__(self, streams_per_connection: int) -> None:
        self.opened = 0
        self.closed = 0
        self.pool = Pool(
            connect_timeout_s=LONG_S,
            streams_per_connection=streams_per_connection,
            opened=self._opened,
            closed=self._closed,
        )

    async def open(self, origin: Origin, timeout_s: float = LONG_S) -> Stream:
        return await self.pool.of(origin).open(POST, timeout_s)

    def connections(self, origin: Origin) -> list[Connection]:
        return self.pool.origins[origin].connections

    def _opened(self, origin: Origin) -> None:
        self.opened += 1

    def _closed(self, origin: Origin) -> None:
        self.closed += 1


@asynccontextmanager
async def pooled(streams_per_connection: int = 100) -> AsyncIterator[Pooled]:
    pooled = Pooled(streams_per_connection)
    try:
        yield pooled
    finally:
        pooled.pool.close()
        await until(lambda: not pooled.pool.origins)
        assert pooled.opened == pooled.closed


def allow(peer: Http2Peer, streams: int) -> None:
    """The peer announces how many streams it takes."""

    def say(h2: H2Connection) -> None:
        h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: streams})

    peer.act(say)


# One connection for many.


async def test_one_dial_for_a_hundred_openers() -> None:
    async with Service.listening() as service, pooled() as world:
        origin = h2c(service.port)
        streams = await asyncio.gather(*[world.open(origin) for _ in range(100)])
        assert sorted(stream.id for stream in streams) == list(range(1, 200, 2))
        assert len({stream.connection for stream in streams}) == 1
        assert (len(service.connections), world.opened) == (1, 1)


async def test_a_second_connection_only_when_the_first_is_full() -> None:
    async with Service.listening() as service, pooled(streams_per_connection=3) as world:
        origin = h2c(service.port)
        first = [await world.open(origin) for _ in range(3)]
        assert len(world.connections(origin)) == 1
        second = await world.open(origin)
        assert len(world.connections(origin)) == 2
        first[1].abort()
        assert (await world.open(origin)).connection is first[0].connection
        assert (await world.open(origin)).connection is second.connection
        assert world.opened == 2


async def test_as_many_connections_as_openers_need() -> None:
    async with Service.listening() as service, pooled(streams_per_connection=10) as world:
        origin = h2c(service.port)
        streams = await asyncio.gather(*[world.open(origin) for _ in range(35)])
        assert len({stream.connection for stream in streams}) == 4
        assert world.opened == 4


async def test_origins_have_their_own_connections() -> None:
    async with Service.listening() as one, Service.listening() as two, pooled() as world:
        first, second = await asyncio.gather(world.open(h2c(one.port)), world.open(h2c(two.port)))
        assert first.connection is not second.connection
        assert len(world.pool.origins) == 2


async def test_a_dial_that_hangs_is_not_in_another_origins_way(credentials: Credentials) -> None:
    async with Service.listening() as service, pooled() as world, gated(service.port) as gate:
        slow = spawn(world.open(gate.origin(credentials)), name="slow")
        await until(lambda: gate.waiting)
        await world.open(h2c(service.port))
        assert not slow.done()
        slow.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await slow


async def test_max_concurrent_streams_of_the_peer() -> None:
    async with Service.listening() as service, pooled() as world:
        origin = h2c(service.port)
        first = await world.open(origin)
        allow(service.connections[0], 2)
        await until(lambda: first.connection.room == 1)
        assert (await world.open(origin)).connection is first.connection
        assert (await world.open(origin)).connection is not first.connection
        allow(service.connections[0], 3)
        await until(lambda: first.connection.room == 1)
        assert (await world.open(origin)).connection is first.connection


async def test_the_streams_of_a_connection_in_use_are_bounded_by_both() -> None:
    async with Service.listening() as service, pooled(streams_per_connection=2) as world:
        origin = h2c(service.port)
        streams = [await world.open(origin) for _ in range(5)]
        assert [connection.open_streams for connection in world.connections(origin)] == [2, 2, 1]
        assert streams[0].connection.room > 0, "the peer would take more"


# Connections that end.


async def test_goaway_moves_new_streams_to_a_new_connection() -> None:
    async with Service.listening() as service, pooled() as world:
        origin = h2c(service.port)
        old = await world.open(origin)
        asked = await service.request()
        asked.peer.say_goaway(1)
        await until(lambda: not old.connection.usable)
        assert (world.opened, world.closed) == (1, 1)
        new = await world.open(origin)
        assert new.connection is not old.connection
        asked.respond(200)
        assert await old.response(PATIENCE_S) == 200
        await asked.send(b"goes on")
        asked.end()
        old.close()
        await asked.peer.until(lambda: asked.peer.lost)
        assert not new.over


async def test_streams_that_goaway_leaves_out_can_be_opened_again() -> None:
    async with Service.listening() as service, pooled() as world:
        origin = h2c(service.port)
        left_out = await world.open(origin)
        (await service.request()).peer.say_goaway(0)
        with pytest.raises(StreamResetError, match="stream not taken, GOAWAY: NO_ERROR"):
            await left_out.response(PATIENCE_S)
        again = await world.open(origin)
        (await service.request()).respond(200)
        assert await again.response(PATIENCE_S) == 200


async def test_a_dead_connection_is_dropped() -> None:
    async with Service.listening() as service, pooled() as world:
        origin = h2c(service.port)
        first = await world.open(origin)
        service.connections[0].drop()
        with pytest.raises(StreamResetError, match="lost"):
            await first.response(PATIENCE_S)
        assert world.pool.origins == {}
        assert (world.opened, world.closed) == (1, 1)
        assert (await world.open(origin)).connection is not first.connection


async def test_an_idle_connection_that_dies_is_dropped() -> None:
    async with Service.listening() as service, pooled() as world:
        origin = h2c(service.port)
        (await world.open(origin)).abort()
        assert len(world.connections(origin)) == 1
        await until(lambda: bool(service.connections))
        service.connections[0].drop()
        await until(lambda: not world.pool.origins)


@hasty
async def test_an_idle_connection_is_closed() -> None:
    async with Service.listening() as service, pooled() as world:
        origin = h2c(service.port)
        stream = await world.open(origin)
        await asyncio.sleep(2 * IDLE_S)
        assert not stream.over, "in use"
        stream.abort()
        await asyncio.sleep(IDLE_S - 1)
        assert len(world.connections(origin)) == 1
        again = await world.open(origin)
        assert again.connection is stream.connection
        await asyncio.sleep(2 * IDLE_S)
        assert not again.over, "in use again"
        again.abort()
        await asyncio.sleep(IDLE_S + 1)
        assert world.pool.origins == {}
        (peer,) = service.connections
        assert peer.goaway
        await until(lambda: peer.lost)


# Dials that fail, and waiters.


async def test_a_failed_dial_wakes_all_who_wait_with_the_same_error() -> None:
    async with pooled() as world:
        origin = h2c(closed_port())
        results = await asyncio.gather(*[world.open(origin) for _ in range(50)], return_exceptions=True)
        assert len(set(map(id, results))) == 1
        assert isinstance(results[0], DialError)
        address = origin.address
        assert str(results[0]) == f"connect to http://service at {address}: connection refused"
        assert world.pool.origins == {}


async def test_after_a_failed_dial_the_next_opener_dials_again() -> None:
    async with pooled() as world:
        port = closed_port()
        with pytest.raises(DialError):
            await world.open(h2c(port))
        server = await asyncio.get_running_loop().create_server(
            lambda: Http2Peer(client=False), "127.0.0.1", port
        )
        await world.open(h2c(port))
        world.pool.close()
        server.close()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", goaway(0)])
async def test_a_peer_that_hangs_up_at_once_is_not_dialled_for_ever(said: bytes) -> None:
    """In a thread of its own it is quick enough to be gone when the dial is complete."""
    dialled = 0

    def hang_up(listener: socket.socket) -> None:
        nonlocal dialled
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                dialled += 1
                sock.sendall(settings() + said if said == goaway(0) else said)
                sock.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = spawn(asyncio.to_thread(hang_up, listener), name="server")
        try:
            async with pooled() as world:
                origin = h2c(listener.getsockname()[1])
                for _ in range(20):
                    with pytest.raises(UpstreamError):
                        stream = await world.open(origin)
                        await stream.response(PATIENCE_S)
                    await until(lambda: not world.pool.origins)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            await server
    assert dialled <= 20


class Gate:
    """A TCP port in front of another one: what comes goes on once the gate is open."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.waiting = False
        self.port = 0

    def origin(self, credentials: Credentials) -> Origin:
        return Origin("https", "localhost", Address("127.0.0.1", self.port), credentials.ca)


@asynccontextmanager
async def gated(port: int) -> AsyncIterator[Gate]:
    """Dials through it hang in the TLS handshake until it is open."""
    gate = Gate()
    pumps: list[asyncio.Task[None]] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gate.waiting = True
        await gate.open.wait()
        behind = await asyncio.open_connection("127.0.0.1", port)
        pumps.append(spawn(pump(reader, behind[1]), name="in"))
        pumps.append(spawn(pump(behind[0], writer), name="out"))

    server = await asyncio.start_server(come, "127.0.0.1", 0)
    gate.port = server.sockets[0].getsockname()[1]
    try:
        yield gate
    finally:
        gate.open.set()
        server.close()
        for _ in range(20):
            await asyncio.sleep(0)
        await asyncio.gather(*pumps)


async def test_a_waiter_whose_time_is_up_leaves_the_dial_to_the_others(credentials: Credentials) -> None:
    tls = server_context(credentials.certificate, credentials.key)
    async with Service.listening(tls=tls) as service, gated(service.port) as gate, pooled() as world:
        origin = gate.origin(credentials)
        patient = spawn(world.open(origin), name="patient")
        cancelled = spawn(world.open(origin), name="cancelled")
        with pytest.raises(
            UpstreamError, match=r"^https://localhost at [0-9.:]+: not connected within 0.01 s$"
        ):
            await world.open(origin, timeout_s=0.01)
        cancelled.cancel()
        await until(lambda: gate.waiting and cancelled.done())
        gate.open.set()
        assert (await patient).id == 1
        assert world.opened == 1


async def test_a_dial_that_nobody_waits_for_any_more(credentials: Credentials) -> None:
    """Its connection stays, for the next one who comes, and is closed when nobody does."""
    tls = server_context(credentials.certificate, credentials.key)
    async with Service.listening(tls=tls) as service, gated(service.port) as gate, pooled() as world:
        origin = gate.origin(credentials)
        with pytest.raises(UpstreamError):
            await world.open(origin, timeout_s=0.01)
        gate.open.set()
        await until(lambda: world.opened == 1)
        origin_pool = world.pool.origins[origin]
        assert list(origin_pool._idle) == origin_pool.connections
        assert (await world.open(origin)).connection in origin_pool.connections
        assert origin_pool._idle == {}


async def test_room_is_waited_for_when_there_are_too_many_connections() -> None:
    async with Service.listening() as service, pooled(streams_per_connection=1) as world:
        origin = h2c(service.port)
        streams = [await world.open(origin) for _ in range(CONNECTIONS_PER_ORIGIN)]
        waiting = [spawn(world.open(origin), name=f"waits {number}") for number in range(3)]
        text = f"no free stream on {CONNECTIONS_PER_ORIGIN} connections within 0.01 s"
        with pytest.raises(UpstreamError, match=text):
            await world.open(origin, timeout_s=0.01)
        for stream in streams[:3]:
            stream.abort()
        opened = await asyncio.gather(*waiting)
        assert {stream.connection for stream in opened} == {stream.connection for stream in streams[:3]}
        assert world.opened == CONNECTIONS_PER_ORIGIN
        assert world.pool.origins[origin]._room_waiters == set()


async def test_who_waits_for_room_dials_when_a_connection_is_lost() -> None:
    async with Service.listening() as service, pooled(streams_per_connection=1) as world:
        origin = h2c(service.port)
        for _ in range(CONNECTIONS_PER_ORIGIN):
            await world.open(origin)
        waiting = spawn(world.open(origin), name="waits")
        await until(lambda: bool(world.pool.origins[origin]._room_waiters))
        service.connections[7].drop()
        await waiting
        assert world.opened == CONNECTIONS_PER_ORIGIN + 1


# The table of origins.


async def test_origins_long_gone_do_not_pile_up() -> None:
    async with pooled() as world:
        ports = [closed_port() for _ in range(20)]
        await asyncio.gather(*[world.open(h2c(port)) for port in ports], return_exceptions=True)
        assert world.pool.origins == {}


async def test_an_origin_is_not_forgotten_while_somebody_is_about_to_dial_it() -> None:
    """The last connection goes while an opener waits for room: it dials for the pool that the table knows."""
    async with Service.listening() as service, pooled(streams_per_connection=1) as world:
        origin = h2c(service.port)
        for _ in range(CONNECTIONS_PER_ORIGIN):
            await world.open(origin)
        waiting = spawn(world.open(origin), name="waits")
        await until(lambda: bool(world.pool.origins[origin]._room_waiters))
        for peer in service.connections:
            peer.drop()
        stream = await waiting
        assert world.connections(origin) == [stream.connection]


async def test_close() -> None:
    async with Service.listening() as service, pooled(streams_per_connection=1) as world:
        origin = h2c(service.port)
        stream = await world.open(origin)
        world.pool.close()
        assert stream.over
        await until(lambda: not world.pool.origins)
        assert (world.opened, world.closed) == (1, 1)


async def test_close_tells_who_waits_for_a_dial(credentials: Credentials) -> None:
    async with Service.listening() as service, gated(service.port) as gate, pooled() as world:
        waiting = [spawn(world.open(gate.origin(credentials)), name="waits") for _ in range(2)]
        await until(lambda: gate.waiting)
        world.pool.close()
        for task in waiting:
            with pytest.raises(DialError, match="we are stopping"):
                await task
        assert world.opened == 0


async def test_close_tells_who_waits_for_room() -> None:
    async with Service.listening() as service, pooled(streams_per_connection=1) as world:
        origin = h2c(service.port)
        for _ in range(CONNECTIONS_PER_ORIGIN):
            await world.open(origin)
        waiting = spawn(world.open(origin), name="waits")
        await until(lambda: bool(world.pool.origins[origin]._room_waiters))
        world.pool.close()
        with pytest.raises(DialError, match="we are stopping"):
            await waiting


async def test_a_pool_of_one_origin_knows_when_it_is_unused() -> None:
    unused: list[Origin] = []
    origin = h2c(closed_port())
    pool = OriginPool(
        origin,
        connect_timeout_s=LONG_S,
        streams_per_connection=1,
        opened=lambda _: None,
        closed=lambda _: None,
        unused=unused.append,
    )
    assert pool.unused
    opening = spawn(pool.open(POST, LONG_S), name="open")
    await asyncio.sleep(0)
    assert not pool.unused
    with pytest.raises(DialError):
        await opening
    assert pool.unused
    assert unused == [origin]

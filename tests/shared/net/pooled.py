"""A pool for tests, with its counts; and servers that keep its dials waiting or refuse them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from h2.connection import H2Connection
from h2.settings import SettingCodes

from shared.address import Address
from shared.net.dial import Origin
from shared.net.http2.connection import Connection
from shared.net.legs.stream import Stream
from shared.net.names import names
from shared.net.names.endpoint import Resolve
from shared.net.pool.pool import Pool
from shared.net.pool.pool_limits import PoolLimits
from shared.ops.pool_counts import OriginCounts
from shared.tasks import spawn
from tests.shared.conftest import Credentials
from tests.shared.http2.dialogue import POST
from tests.shared.net.loopback import turns, until
from tests.support.http2_peer import Http2Peer, Service

LONG_S = 3600.0


def h2c(port: int) -> Origin:
    return Origin("http", "service", Address("127.0.0.1", port))


class Pooled:
    """A pool with its counters."""

    service: Service
    """Whom it leads to, where `serving` has made it."""

    def __init__(
        self, limits: PoolLimits, resolve: Resolve, chance: float, wall_clock: Callable[[], float]
    ) -> None:
        self.counts = OriginCounts()
        self.pool = Pool(
            limits=limits,
            counts=lambda _: self.counts,
            resolve=resolve,
            chance=lambda: chance,
            wall_clock=wall_clock,
        )

    @property
    def opened(self) -> int:
        return self.counts.opened_total

    def closed(self) -> dict[str, int]:
        """How many for which reason."""
        return {reason: count for reason, count in self.counts.closed_by_reason.items() if count}

    async def open(self, origin: Origin, timeout_s: float = LONG_S) -> Stream:
        """A stream, as if it was answered with what its owner wanted."""
        stream = await self.pool.of(origin).open(POST, timeout_s)
        stream.connection.has_carried = True
        return stream

    async def wait_behind(self, origin: Origin, connections: int) -> asyncio.Task[Stream]:
        """An opener that waits for room, behind so many connections with a stream each."""
        for _ in range(connections):
            await self.open(origin)
        waiting = spawn(self.open(origin), name="waits")
        await until(lambda: self.pool.origins[origin].waiting == 1)
        return waiting

    def connections(self, origin: Origin) -> list[Connection]:
        return self.pool.origins[origin].connections


@asynccontextmanager
async def pooled(
    streams_per_connection: int = 100,
    *,
    resolve: Resolve = names.resolve,
    chance: float = 0.5,
    wall_clock: Callable[[], float] = time.time,
    **limits: Any,
) -> AsyncIterator[Pooled]:
    wanted = PoolLimits(LONG_S, streams_per_connection)
    pooled = Pooled(replace(wanted, **limits), resolve, chance, wall_clock)
    try:
        yield pooled
    finally:
        await pooled.pool.close(0.0)
        await until(lambda: not pooled.pool.origins)
        assert (pooled.counts.open, pooled.counts.draining, pooled.counts.waiting) == (0, 0, 0)


@asynccontextmanager
async def serving(streams_per_connection: int = 100, **options: Any) -> AsyncIterator[tuple[Pooled, Origin]]:
    """A pool, and the origin of a service."""
    async with Service.listening() as service, pooled(streams_per_connection, **options) as world:
        world.service = service
        yield world, h2c(service.port)


def allow(peer: Http2Peer, streams: int) -> None:
    """The peer announces how many streams it takes."""

    def say(h2: H2Connection) -> None:
        h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: streams})

    peer.act(say)


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
        await turns(20)
        await asyncio.gather(*pumps)

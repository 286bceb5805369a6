"""The clock of a pooled connection: how old it gets, and how long a silent peer is believed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from shared.errors import StreamResetError
from shared.net.http2.liveness import STREAMS_TIMEOUT_S
from shared.net.legs.stream import Stream
from shared.net.pool.pool_limits import PoolLimits
from shared.net.pool.pooled_connection import AGE_JITTER, PooledConnection
from tests.shared.http2.dialogue import settings
from tests.shared.net.hasty_loop import hasty
from tests.shared.net.loopback import PATIENCE_S, App, Peer, until
from tests.shared.net.pooled import Pooled, h2c, pooled, serving
from tests.support.http2_peer import Service

PING = bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + bytes(8)


# Dials.


async def test_what_a_failed_dial_has_made_is_dropped() -> None:
    async with Service.listening() as service:
        member = PooledConnection(
            PoolLimits(), jitter=0.0, changed=lambda _: None, lost=lambda _: None, retire=lambda *_: None
        )
        member.discard()
        await asyncio.get_running_loop().create_connection(member.make, "127.0.0.1", service.port)
        await until(lambda: bool(service.connections))
        member.discard()
        assert await member.connection.wait_closed(PATIENCE_S)
        await service.connections[0].until(lambda: service.connections[0].lost)


# Age.


@hasty
@pytest.mark.parametrize(("chance", "age_s"), [(0.0, 1000.0), (1.0, 1000.0 * (1 - AGE_JITTER))])
async def test_the_age_has_jitter(chance: float, age_s: float) -> None:
    async with (
        Service.listening() as service,
        pooled(chance=chance, max_age_s=1000.0, ping_interval_s=0.0) as world,
    ):
        stream = await world.open(h2c(service.port))
        (member,) = world.pool.origins[h2c(service.port)].members
        await asyncio.sleep(age_s - 1)
        assert member.reason == ""
        await asyncio.sleep(2)
        assert member.reason == "age"
        assert not stream.over


@hasty
async def test_for_ever() -> None:
    async with serving(max_age_s=0.0, ping_interval_s=0.0) as (world, origin):
        stream = await world.open(origin)
        await asyncio.sleep(1e6)
        assert (await world.open(origin)).connection is stream.connection


@hasty
async def test_an_age_that_is_shortened() -> None:
    async with serving(max_age_s=10_000.0) as (world, origin):
        await world.open(origin)
        (member,) = world.pool.origins[origin].members
        await asyncio.sleep(100)
        world.pool.set_limits(replace(world.pool.limits, max_age_s=50.0))
        await until(lambda: member.reason == "age")


# Silence.


class Silent:
    """A stream to a server of bare bytes, which says its SETTINGS, and then what it is told to."""

    def __init__(self, world: Pooled, stream: Stream, peer: Peer) -> None:
        self.world = world
        self.stream = stream
        self.peer = peer

    @property
    def pings(self) -> int:
        return bytes(self.peer.received).count(PING)


@asynccontextmanager
async def silent_peer(**limits: Any) -> AsyncIterator[Silent]:
    app = App()
    async with pooled(**limits) as world:
        stream = await world.open(h2c(app.port))
        peer = await app.accept()
        peer.start_reading()
        await peer.send(settings())
        yield Silent(world, stream, peer)
    await app.close()


@hasty
async def test_a_silent_peer_is_asked_and_given_up() -> None:
    async with silent_peer(ping_interval_s=60.0) as silent:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await asyncio.sleep(59)
        assert silent.pings == 0
        await asyncio.sleep(2)
        assert silent.pings == 1
        with pytest.raises(StreamResetError, match=r"^\S+ has not answered PING within 15 s$"):
            await silent.stream.response(1000)
        silent_s = loop.time() - started  # twice the timeout where TCP has acknowledged our SETTINGS late
        assert 60 + STREAMS_TIMEOUT_S - 1 < silent_s < 60 + 2 * STREAMS_TIMEOUT_S + 2
        await until(lambda: silent.world.closed() == {"silent": 1})


@hasty
async def test_whatever_the_peer_sends_is_an_answer() -> None:
    async with silent_peer(ping_interval_s=60.0) as silent:
        await asyncio.sleep(62)
        assert silent.pings == 1
        await silent.peer.send(settings())
        await asyncio.sleep(58)
        assert silent.pings == 1, "one in a minute"
        await asyncio.sleep(4)
        assert silent.pings == 2
        assert not silent.stream.over


@hasty
async def test_nobody_is_asked_without_streams() -> None:
    async with silent_peer(ping_interval_s=60.0, idle_timeout_s=1000.0) as silent:
        silent.stream.abort()
        await asyncio.sleep(500)
        assert silent.pings == 0
        (origin,) = silent.world.pool.origins
        await silent.world.open(origin)
        await asyncio.sleep(1)
        assert silent.pings == 1, "at once, for it has been silent so long"


@hasty
async def test_ping_can_be_turned_off_and_on() -> None:
    async with silent_peer(ping_interval_s=0.0) as silent:
        await asyncio.sleep(1000)
        assert silent.pings == 0
        pool = silent.world.pool
        pool.set_limits(replace(pool.limits, ping_interval_s=60.0))
        await asyncio.sleep(1)
        assert silent.pings == 1


async def test_one_timer_that_no_stream_moves() -> None:
    async with serving() as (world, origin):
        await world.open(origin)
        (member,) = world.pool.origins[origin].members
        timer = member._timer
        streams = [await world.open(origin) for _ in range(20)]
        for stream in streams:
            stream.abort()
        assert member._timer is timer

"""One origin's connections, against servers played by h2: who dials, who waits, who gets which."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from shared.address import Address
from shared.errors import DialError, StreamResetError, UpstreamError
from shared.net.dial import Origin
from shared.net.http_proxy import HttpProxy
from shared.net.names.endpoint import Endpoint
from shared.net.pool.dial_backoff import MOST_S
from shared.net.pool.origin_pool import ABSENCES
from shared.net.pool.pooled_connection import IN_VAIN_S
from shared.net.tls.contexts import read_again, server_context
from shared.tasks import spawn
from tests.shared.conftest import Credentials
from tests.shared.http2.dialogue import (
    GET,
    POST,
    goaway,
    settings,
)
from tests.shared.net.hasty_loop import hasty
from tests.shared.net.loopback import PATIENCE_S, until
from tests.shared.net.pooled import LONG_S, Pooled, allow, gated, h2c, pooled, serving
from tests.support.connect_proxy import ConnectProxy
from tests.support.http2_peer import Http2Peer, Service
from tests.support.metadata_server import closed_port
from tests.support.wall_clock import Clock

CONNECTIONS = 3
"""A bound that a test can reach."""

# One connection for many.


async def test_one_dial_for_eighty_openers() -> None:
    async with serving() as (world, origin):
        streams = await asyncio.gather(*[world.open(origin) for _ in range(80)])
        assert sorted(stream.id for stream in streams) == list(range(1, 160, 2))
        assert len({stream.connection for stream in streams}) == 1
        assert (len(world.service.connections), world.opened) == (1, 1)


async def test_a_second_connection_is_dialled_before_the_first_is_full() -> None:
    """At 81 of 100; the first goes on to be filled."""
    async with serving() as (world, origin):
        streams = [await world.open(origin) for _ in range(80)]
        await until(lambda: world.pool.origins[origin]._dialling is None)
        assert world.opened == 1
        streams.append(await world.open(origin))
        await until(lambda: world.opened == 2)
        streams += [await world.open(origin) for _ in range(19)]
        first, second = world.connections(origin)
        assert (first.open_streams, second.open_streams) == (100, 0)
        assert {stream.connection for stream in streams} == {first}
        assert (await world.open(origin)).connection is second
        assert world.opened == 2


async def test_whoever_comes_all_at_once_leaves_a_spare_connection_behind() -> None:
    async with serving() as (world, origin):
        streams = await asyncio.gather(*[world.open(origin) for _ in range(100)])
        assert len({stream.connection for stream in streams}) == 1
        await until(lambda: world.opened == 2)


async def test_a_spare_connection_that_cannot_be_had_is_in_nobody_s_way() -> None:
    async with serving(streams_per_connection=10) as (world, origin):
        for _ in range(8):
            await world.open(origin)
        world.service.stop_listening()
        for _ in range(2):
            await world.open(origin)
        await until(lambda: world.counts.dials_failed_total == 1)
        await until(lambda: world.pool.origins[origin]._dialling is None)
        assert world.connections(origin)[0].open_streams == 10


async def test_a_second_connection_only_when_the_first_is_full() -> None:
    async with serving(streams_per_connection=3) as (world, origin):
        first = [await world.open(origin) for _ in range(3)]
        assert len(world.connections(origin)) == 1
        second = await world.open(origin)
        assert len(world.connections(origin)) == 2
        first[1].abort()
        assert (await world.open(origin)).connection is first[0].connection
        assert (await world.open(origin)).connection is second.connection
        assert world.opened == 2


async def test_as_many_connections_as_openers_need() -> None:
    async with serving(streams_per_connection=10) as (world, origin):
        streams = await asyncio.gather(*[world.open(origin) for _ in range(35)])
        assert len({stream.connection for stream in streams}) == 4
        assert world.opened == 4


async def test_a_request_without_a_body_ends_with_its_headers() -> None:
    async with Service.listening() as service, pooled() as world:
        pool = world.pool.of(h2c(service.port))
        first = await pool.open(GET, PATIENCE_S, end_stream=True)
        assert pool.open_now(GET, end_stream=True) is not None
        for _ in range(2):
            there = await service.request()
            assert there.frames == ["HEADERS END"]
            there.respond(204, end=True)
        assert await first.response(PATIENCE_S) == 204
        assert first.bodiless


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
    async with serving() as (world, origin):
        first = await world.open(origin)
        allow(world.service.connections[0], 2)
        await until(lambda: first.connection.room == 1)
        assert (await world.open(origin)).connection is first.connection
        assert (await world.open(origin)).connection is not first.connection
        allow(world.service.connections[0], 3)
        await until(lambda: first.connection.room == 1)
        assert (await world.open(origin)).connection is first.connection


# Connections that end.


async def test_goaway_moves_new_streams_to_a_new_connection() -> None:
    async with serving() as (world, origin):
        old = await world.open(origin)
        asked = await world.service.request()
        asked.peer.say_goaway(1)
        await until(lambda: not old.connection.usable)
        assert (world.opened, world.counts.open, world.counts.draining) == (1, 1, 1)
        new = await world.open(origin)
        assert new.connection is not old.connection
        asked.respond(200)
        assert await old.response(PATIENCE_S) == 200
        await asked.send(b"goes on")
        asked.end()
        old.close()
        await asked.peer.until(lambda: asked.peer.lost)
        await until(lambda: world.closed() == {"goaway": 1})
        assert not new.over


async def test_streams_that_goaway_leaves_out_can_be_opened_again() -> None:
    async with serving() as (world, origin):
        left_out = await world.open(origin)
        (await world.service.request()).peer.say_goaway(0)
        with pytest.raises(StreamResetError, match="stream not taken, GOAWAY: NO_ERROR"):
            await left_out.response(PATIENCE_S)
        again = await world.open(origin)
        (await world.service.request()).respond(200)
        assert await again.response(PATIENCE_S) == 200


async def test_a_dead_connection_is_dropped() -> None:
    async with serving() as (world, origin):
        first = await world.open(origin)
        world.service.connections[0].drop()
        with pytest.raises(StreamResetError, match="lost"):
            await first.response(PATIENCE_S)
        assert world.pool.origins == {}
        assert (world.opened, world.closed()) == (1, {"lost": 1})
        assert (await world.open(origin)).connection is not first.connection


async def test_an_idle_connection_that_dies_is_dropped() -> None:
    async with serving() as (world, origin):
        (await world.open(origin)).abort()
        assert len(world.connections(origin)) == 1
        await until(lambda: bool(world.service.connections))
        world.service.connections[0].drop()
        await until(lambda: not world.pool.origins)


@hasty
async def test_an_idle_connection_is_closed() -> None:
    async with serving(idle_timeout_s=300.0, max_age_s=0) as (world, origin):
        stream = await world.open(origin)
        await asyncio.sleep(2 * 300)
        assert not stream.over, "in use"
        stream.abort()
        await asyncio.sleep(300 - 1)
        assert len(world.connections(origin)) == 1
        again = await world.open(origin)
        assert again.connection is stream.connection
        await asyncio.sleep(2 * 300)
        assert not again.over, "in use again"
        again.abort()
        await asyncio.sleep(300 + 1)
        assert world.pool.origins == {}
        assert world.closed() == {"idle": 1}
        (peer,) = world.service.connections
        assert peer.goaway
        await until(lambda: peer.lost)


# Dials that fail, and waiters.


async def test_a_failed_dial_is_told_to_all_who_wait() -> None:
    async with pooled() as world:
        origin = h2c(closed_port())
        results = await asyncio.gather(*[world.open(origin) for _ in range(50)], return_exceptions=True)
        assert {type(result) for result in results} == {DialError}
        address = origin.address
        assert {str(result) for result in results} == {
            f"connect to http://service at {address}: connection refused"
        }
        assert world.counts.dials_failed_total == 1
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
        await world.pool.close(0.0)
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
            async with pooled(chance=0.0) as world:
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
        (member,) = origin_pool.members
        assert member._idle_due() <= member.born + member.limits.idle_timeout_s
        assert (await world.open(origin)).connection is member.connection
        assert member._idle_due() > LONG_S * 1e6


async def test_room_is_waited_for_when_there_are_too_many_connections() -> None:
    async with serving(streams_per_connection=1, connections_per_origin=CONNECTIONS) as (world, origin):
        streams = [await world.open(origin) for _ in range(CONNECTIONS)]
        waiting = [spawn(world.open(origin), name=f"waits {number}") for number in range(3)]
        text = f"no free stream on {CONNECTIONS} connections within 0.01 s"
        with pytest.raises(UpstreamError, match=text):
            await world.open(origin, timeout_s=0.01)
        for stream in streams[:3]:
            stream.abort()
        opened = await asyncio.gather(*waiting)
        assert {stream.connection for stream in opened} == {stream.connection for stream in streams[:3]}
        assert world.opened == CONNECTIONS
        assert world.pool.origins[origin].waiting == 0


async def test_who_waits_for_room_dials_when_a_connection_is_lost() -> None:
    async with serving(streams_per_connection=1, connections_per_origin=CONNECTIONS) as (world, origin):
        waiting = await world.wait_behind(origin, CONNECTIONS)
        world.service.connections[1].drop()
        await waiting
        assert world.opened == CONNECTIONS + 1


async def test_only_so_many_wait() -> None:
    async with serving(streams_per_connection=1, connections_per_origin=1, max_waiting=3) as (world, origin):
        first = await world.open(origin)
        waiting = [spawn(world.open(origin), name=f"waits {number}") for number in range(3)]
        await until(lambda: world.counts.waiting == 3)
        with pytest.raises(
            UpstreamError, match=r"^http://service at \S+: 3 wait for a stream, which is max_waiting$"
        ):
            await world.open(origin)
        assert world.counts.refused_total == 1
        first.abort()
        await until(lambda: world.counts.waiting == 2)
        for task in waiting:
            (await task).abort()
        assert world.counts.waiting == 0


# After a failure.


class Refusing:
    """A port that accepts connections and ends them at once, and counts them."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self.port = int(listener.getsockname()[1])
        self.dials = 0
        self._listener = listener

    def accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._listener.accept()[0].close()
                self.dials += 1


async def insist(world: Pooled, origin: Origin) -> list[int]:
    """A thousand callers, each of whom tries again as soon as it is refused, for a minute: their tries."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + 60

    async def caller() -> int:
        tries = 0
        while loop.time() < ends:
            tries += 1
            with pytest.raises(UpstreamError):
                stream = await world.open(origin, 30)
                await stream.response(PATIENCE_S)
        return tries

    return await asyncio.gather(*[caller() for _ in range(1000)])


MOST_DIALS = 8 + 60 / (MOST_S / 4) + 2
"""In a minute with a chance of 1/4: the waits are 0.025 s doubled seven times, then 2.5 s each."""


@hasty
async def test_a_thousand_impatient_callers_make_few_dials() -> None:
    async with pooled(chance=0.25) as world:
        tries = await insist(world, h2c(closed_port()))
        assert 10 <= world.counts.dials_failed_total <= MOST_DIALS
        assert max(tries) <= world.counts.dials_failed_total


@hasty
async def test_nor_do_they_where_the_port_is_open_and_nobody_speaks() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listener:
        refusing = Refusing(listener)
        loop.add_reader(listener, refusing.accept)
        async with pooled(chance=0.25) as world:
            tries = await insist(world, h2c(refusing.port))
            # Each serves 100, so those who wait when the minute is over need another ten.
            assert 10 <= refusing.dials <= MOST_DIALS + 10
            assert world.counts.dials_failed_total == refusing.dials
        loop.remove_reader(listener)
    assert min(tries) > 1


@hasty
async def test_who_comes_during_the_backoff_waits_for_the_next_attempt() -> None:
    loop = asyncio.get_running_loop()
    async with pooled(chance=1.0) as world:
        origin = h2c(closed_port())
        for _ in range(5):  # 0.1, 0.2, 0.4, 0.8, 1.6 s
            with pytest.raises(DialError, match=r"connection refused$"):
                await world.open(origin)
        started = loop.time()
        with pytest.raises(DialError, match=r"connection refused; the next attempt is due in 1\.[56] s$"):
            await world.open(origin, 1.0)
        assert loop.time() - started < 0.5
        async with Service.listening(port=origin.address.port):
            await world.open(origin, 2.0)
        assert 1.4 < loop.time() - started < 2.0
        assert world.counts.dials_failed_total == 5
        await until(lambda: world.pool.origins[origin].backoff.reason == "")


async def test_the_deadline_s_error_has_the_last_failure_too() -> None:
    """All are full and no other can be had."""
    async with serving(streams_per_connection=1) as (world, origin):
        await world.open(origin)
        world.service.stop_listening()
        with pytest.raises(UpstreamError) as caught:
            await world.open(origin, 0.05)
        assert str(caught.value) == (
            f"{origin}: no free stream on 1 connections (the last attempt: connect to {origin}: "
            "connection refused) within 0.05 s"
        )
        assert not isinstance(caught.value, DialError)


async def test_a_peer_that_allows_no_stream_is_not_dialled_for_ever() -> None:
    """Its SETTINGS come with the end of the dial, or with the first streams."""
    async with serving() as (world, origin):
        first = await world.open(origin)
        allow(world.service.connections[0], 0)
        await until(lambda: first.connection.room <= 0)
        (await world.open(origin)).abort()
        assert world.opened == 2


# Connections that are to accept no new streams.


@hasty
async def test_an_old_connection_ends_with_its_last_stream() -> None:
    async with serving(max_age_s=600.0, ping_interval_s=0.0) as (world, origin):
        old = await world.open(origin)
        asked = await world.service.request()
        await asyncio.sleep(600)
        assert world.pool.origins[origin].members[0].connection is not old.connection, "a successor is there"
        assert (world.counts.open, world.counts.draining) == (2, 1)
        assert (await world.open(origin)).connection is not old.connection
        asked.respond(200)
        assert await old.response(PATIENCE_S) == 200
        assert not asked.peer.goaway, "nothing is said as long as it is in use"
        old.abort()
        await until(lambda: world.closed() == {"age": 1})
        assert asked.peer.goaway


@hasty
async def test_an_idle_connection_that_is_old_has_no_successor() -> None:
    async with serving(max_age_s=100.0, idle_timeout_s=1000.0) as (world, origin):
        (await world.open(origin)).abort()
        await asyncio.sleep(94)
        assert len(world.connections(origin)) == 1
        await asyncio.sleep(2)
        assert world.pool.origins == {}
        assert (world.opened, world.closed()) == (1, {"age": 1})


class Zone:
    """The addresses of a name, which can be changed."""

    def __init__(self, port: int, *hosts: str) -> None:
        self.port = port
        self.hosts = hosts
        self.asked = 0

    async def resolve(self, _: Address) -> list[Endpoint]:
        self.asked += 1
        return [(socket.AF_INET, (host, self.port)) for host in self.hosts]


@contextlib.asynccontextmanager
async def listening_everywhere() -> AsyncIterator[Zone]:
    """A service on 127.0.0.1 and 127.0.0.2, and a name that has the first address."""
    server = await asyncio.get_running_loop().create_server(lambda: Http2Peer(client=False), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    other = await asyncio.get_running_loop().create_server(lambda: Http2Peer(client=False), "127.0.0.2", port)
    try:
        yield Zone(port, "127.0.0.1")
    finally:
        server.close()
        other.close()


@hasty
async def test_a_change_of_the_name_s_addresses_is_followed() -> None:
    async with listening_everywhere() as zone, pooled(resolve=zone.resolve, resolve_interval_s=30.0) as world:
        origin = Origin("http", "service", Address("service.example", zone.port))
        old = await world.open(origin)
        await asyncio.sleep(200)
        assert old.connection.usable
        assert 6 <= zone.asked <= 9
        zone.hosts = ("127.0.0.2",)
        await asyncio.sleep(30 * (ABSENCES - 1))
        assert (await world.open(origin)).connection is old.connection, "it may be one answer of many"
        await asyncio.sleep(31)
        new = await world.open(origin)
        assert (old.connection.peer_name, new.connection.peer_name) == (
            f"127.0.0.1:{zone.port}",
            f"127.0.0.2:{zone.port}",
        )
        assert not old.over
        for stream in list(old.connection.session.streams.values()):
            stream.owner.abort()
        await until(lambda: world.closed() == {"address": 1})


@hasty
async def test_behind_a_proxy_its_own_addresses_are_followed() -> None:
    """Those of the service are never a peer's."""
    asked: list[str] = []

    async def resolve(address: Address) -> list[Endpoint]:
        asked.append(address.host)
        own = address.host == "proxy.example"
        return [(socket.AF_INET, ("127.0.0.1" if own else "127.0.0.3", address.port))]

    async with (
        listening_everywhere() as zone,
        ConnectProxy.listening(zone.port) as proxy,
        pooled(resolve=resolve, resolve_interval_s=30.0) as world,
    ):
        way = HttpProxy(Address("proxy.example", proxy.port))
        origin = Origin("http", "service", Address("service.example", 443), proxy=way)
        old = await world.open(origin)
        await asyncio.sleep(200)
        assert len(asked) >= 6
        assert (await world.open(origin)).connection is old.connection


@hasty
async def test_answers_that_take_turns_drain_nothing() -> None:
    async with listening_everywhere() as zone, pooled(resolve=zone.resolve, resolve_interval_s=30.0) as world:
        origin = Origin("http", "service", Address("service.example", zone.port))
        stream = await world.open(origin)
        for turn in range(20):
            zone.hosts = (f"127.0.0.{1 + turn % 2}",)
            await asyncio.sleep(30)
        assert stream.connection.usable


# Certificates that change.


async def test_a_renewed_ca_file_counts_for_the_next_connection(
    credentials: Credentials, tmp_path: Path
) -> None:
    tls = server_context(credentials.certificate, credentials.key)
    ca = tmp_path / "ca.pem"
    ca.write_bytes(credentials.other_ca.read_bytes())
    async with Service.listening(tls) as service, pooled(chance=0.0, streams_per_connection=1) as world:
        origin = Origin("https", "localhost", Address("127.0.0.1", service.port), ca)
        with pytest.raises(DialError, match="certificate refused"):
            await world.open(origin)
        ca.write_bytes(credentials.ca.read_bytes())
        read_again(ca)  # or a second later
        first = await world.open(origin)
        ca.write_bytes(credentials.other_ca.read_bytes())
        read_again(ca)
        waiting = spawn(world.open(origin, 0.5), name="waits")
        await until(lambda: world.counts.dials_failed_total > 1)
        with pytest.raises(UpstreamError, match="certificate refused"):
            await waiting
        assert not first.over


# Limits that change.


async def test_more_streams_at_run_time() -> None:
    async with serving(streams_per_connection=1, connections_per_origin=1) as (world, origin):
        first = await world.open(origin)
        waiting = spawn(world.open(origin), name="waits")
        await until(lambda: world.counts.waiting == 1)
        world.pool.set_limits(replace(world.pool.limits, streams_per_connection=2))
        assert (await waiting).connection is first.connection
        waiting = spawn(world.open(origin), name="waits")
        await until(lambda: world.counts.waiting == 1)
        world.pool.set_limits(replace(world.pool.limits, connections_per_origin=2))
        assert (await waiting).connection is not first.connection


@hasty
async def test_a_shorter_idle_timeout_counts_for_idle_connections() -> None:
    async with serving(idle_timeout_s=1000.0) as (world, origin):
        (await world.open(origin)).abort()
        world.pool.set_limits(replace(world.pool.limits, idle_timeout_s=10.0))
        await asyncio.sleep(11)
        assert world.pool.origins == {}
        assert world.closed() == {"idle": 1}


async def test_a_server_whose_certificate_has_ended_gets_no_new_streams(credentials: Credentials) -> None:
    """Cloud Run's front end, or whatever has a certificate for its name."""
    context = server_context(credentials.certificate, credentials.key)
    clock = Clock(time.time())
    async with Service.listening(context) as service, pooled(wall_clock=clock) as world:
        origin = Origin("https", "localhost", Address("127.0.0.1", service.port), credentials.ca)
        old = (await world.open(origin)).connection
        clock.now = old.certificate_ends
        with pytest.raises(DialError, match="the peer's certificate ends at this moment"):
            await world.open(origin)
        clock.turn(-1)
        assert (await world.open(origin)).connection is not old


async def test_without_tls_there_is_no_certificate_to_end() -> None:
    clock = Clock(time.time())
    async with Service.listening() as service, pooled(wall_clock=clock) as world:
        old = (await world.open(h2c(service.port))).connection
        clock.turn(1e12)
        assert (await world.open(h2c(service.port))).connection is old


# Who waits for a connection only.


async def test_a_connection_stands_once_its_peer_has_spoken() -> None:
    async with serving() as (world, origin):
        await asyncio.gather(*[world.pool.of(origin).connected(LONG_S) for _ in range(20)])
        (connection,) = world.connections(origin)
        assert connection.speaks_http2
        assert (world.opened, connection.open_streams, world.counts.waiting) == (1, 0, 0)
        await world.pool.of(origin).connected(0.0)
        assert (await world.open(origin)).connection is connection


async def test_a_connection_that_is_full_stands() -> None:
    async with serving(streams_per_connection=1) as (world, origin):
        await world.open(origin)
        await until(lambda: world.connections(origin)[0].speaks_http2)
        await world.pool.of(origin).connected(LONG_S)
        assert world.opened == 1


async def test_who_waits_is_told_of_a_dial_that_failed() -> None:
    async with pooled() as world:
        origin = h2c(closed_port())
        waits = [world.pool.of(origin).connected(LONG_S) for _ in range(3)]
        errors = await asyncio.gather(*waits, return_exceptions=True)
        assert all(isinstance(error, DialError) and "connection refused" in str(error) for error in errors)
        assert len({id(error) for error in errors}) == 3
        assert world.counts.dials_failed_total == 1


async def test_a_peer_that_ends_before_it_speaks_is_told_at_once() -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(24)
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    async with server, pooled() as world:
        origin = h2c(server.sockets[0].getsockname()[1])
        with pytest.raises(DialError, match="ended the connection before it spoke HTTP/2"):
            await world.pool.of(origin).connected(LONG_S)
        assert world.opened == 1


async def test_a_peer_that_says_nothing() -> None:
    """Not even its preface: the connection is there, and nobody knows whether it is HTTP/2."""
    gone = asyncio.Event()

    async def listen_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()
        gone.set()

    silent = await asyncio.start_server(listen_only, "127.0.0.1", 0)
    async with silent:
        async with pooled() as world:
            origin = h2c(silent.sockets[0].getsockname()[1])
            with pytest.raises(UpstreamError, match=r"not connected within 0\.05 s$"):
                await world.pool.of(origin).connected(0.05)
            assert (world.opened, world.counts.waiting) == (1, 0)
        await gone.wait()


async def test_an_idle_timeout_of_nothing_is_in_nobody_s_way() -> None:
    async with serving(idle_timeout_s=0.0) as (world, origin):
        await world.pool.of(origin).connected(LONG_S)
        await until(lambda: origin not in world.pool.origins)
        assert world.closed() == {"idle": 1}


@hasty
async def test_a_connection_on_which_nobody_had_anything_is_not_kept_long() -> None:
    """Names come from clients: one that leads to a 404 must not cost a connection for minutes."""
    async with serving(idle_timeout_s=1000.0) as (world, origin):
        stream = await world.pool.of(origin).open(POST, LONG_S)
        (await world.service.request()).respond(404, end=True)
        assert await stream.response(PATIENCE_S) == 404
        stream.close()
        await asyncio.sleep(IN_VAIN_S - 1)
        assert len(world.connections(origin)) == 1
        await asyncio.sleep(2)
        assert world.pool.origins == {}
        assert world.closed() == {"idle": 1}


async def test_only_so_many_wait_for_a_connection(credentials: Credentials) -> None:
    async with Service.listening() as service, gated(service.port) as gate, pooled(max_waiting=2) as world:
        origin = gate.origin(credentials)
        waits = [spawn(world.pool.of(origin).connected(LONG_S), name=f"waits {n}") for n in range(2)]
        await until(lambda: world.counts.waiting == 2)
        for refused in (world.pool.of(origin).connected(LONG_S), world.open(origin)):
            with pytest.raises(UpstreamError, match="2 wait for a stream, which is max_waiting"):
                await refused
        world.pool.drain()
        for wait in waits:
            with pytest.raises(DialError, match="we are stopping"):
                await wait


async def test_who_gives_up_leaves_the_connection_to_others(credentials: Credentials) -> None:
    context = server_context(credentials.certificate, credentials.key)
    async with Service.listening(context) as service, gated(service.port) as gate, pooled() as world:
        origin = gate.origin(credentials)
        impatient, patient = (
            spawn(world.pool.of(origin).connected(LONG_S), name=name) for name in ("impatient", "patient")
        )
        await until(lambda: gate.waiting)
        impatient.cancel()
        gate.open.set()
        await patient
        assert impatient.cancelled()
        assert (world.opened, world.counts.waiting) == (1, 0)

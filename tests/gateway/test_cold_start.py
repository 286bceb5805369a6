"""Routes whose service scales to zero: what is waited for, how long, and how many may wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.http2.frames import CANCEL, INTERNAL_ERROR, REFUSED_STREAM
from tests.support import gateway_world
from tests.support.gateway_world import GLOB, World, tunnel
from tests.support.hellos import INTERNAL_ERROR as REFUSAL
from tests.support.hellos import hello
from tests.support.http2_peer import Service
from tests.support.network import free_port
from tests.support.retried_tunnels import SAID, end, opens, retried, retries, wait
from tests.support.tcp_peer import PATIENCE_S

AT_ONCE = wait("0")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with gateway_world.world(tmp_path) as world:
        yield world


async def waits(world: World, count: int, route: str = GLOB) -> None:
    """Returns when so many wait for the service to start."""
    async with asyncio.timeout(PATIENCE_S):
        while await world.gateway.metric("hbone_tunnels_starting", route=route) != count:
            pass


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_statuses_of_a_service_that_starts(world: World, status: int) -> None:
    """More of them than max_retries, and for longer than response_timeout."""
    route = tunnel(world.service.port, cold_start="60s")
    gateway = await world.start(route, max_retries=1, response_timeout="100ms")
    client = await world.client(SAID)
    for _ in range(3):
        (await world.service.request()).respond(status, [AT_ONCE], end=True)
    await waits(world, 1)
    assert await gateway.metric("hbone_tunnels_opening", route=GLOB) == 1
    await end(client, await opens(world, client))
    line = await gateway.line()
    assert (line["flags"], line["status"], line["attempts"]) == ("-", 200, 4)
    assert await retries(world, str(status)) == 3
    for name in ("hbone_tunnels_starting", "hbone_tunnels_opening"):
        assert await gateway.metric(name, route=GLOB) == 0
    await world.nothing_is_left()


async def test_a_request_that_is_held_keeps_its_turn(world: World) -> None:
    """It is not sent again for a response_timeout that is meant for services that run."""
    gateway = await world.start(tunnel(world.service.port, cold_start="60s"), response_timeout="50ms")
    client = await world.client(SAID)
    request = await world.service.request()
    await waits(world, 1)
    assert await request.read(len(SAID)) == SAID
    request.respond(200)
    await end(client, request)
    line = await gateway.line()
    assert line["flags"] == "-"
    assert "attempts" not in line
    assert not world.service.asked


async def test_a_service_that_does_not_listen_yet(world: World) -> None:
    port = free_port()
    gateway = await world.start(tunnel(port, cold_start="60s"), connect_timeout="1s", response_timeout="1s")
    client = await world.client(SAID)
    await retried(world, "connect", 2)
    async with Service.listening(port=port) as service:
        request = await service.request()
        assert await request.read(len(SAID)) == SAID
        request.respond(200)
        await end(client, request)
    assert (await gateway.line())["flags"] == "-"


async def test_an_instance_that_ends_while_it_starts(world: World) -> None:
    """Refused streams, too, more often than max_retries."""
    gateway = await world.start(tunnel(world.service.port, cold_start="60s"), max_retries=0)
    client = await world.client(SAID)
    (await world.service.request()).peer.drop()
    (await world.service.request()).reset(REFUSED_STREAM)
    await end(client, await opens(world, client))
    assert (await gateway.line())["attempts"] == 3


@pytest.mark.parametrize("status", [400, 403, 404, 500])
async def test_what_no_start_causes_is_the_answer(world: World, status: int) -> None:
    gateway = await world.start(tunnel(world.service.port, cold_start="60s"))
    client = await world.client(SAID)
    (await world.service.request()).respond(status, [AT_ONCE], end=True)
    await client.rest()
    assert (await gateway.line())["status"] == status
    assert not world.service.asked


async def test_a_stream_that_is_broken_off(world: World) -> None:
    gateway = await world.start(tunnel(world.service.port, cold_start="60s"))
    client = await world.client(SAID)
    (await world.service.request()).reset(INTERNAL_ERROR)
    assert await client.rest() == REFUSAL
    assert (await gateway.line())["flags"] == "UPSTREAM_RESET"


async def test_the_time_is_an_end(world: World) -> None:
    gateway = await world.start(tunnel(world.service.port, cold_start="1s"), response_timeout="100ms")
    client = await world.client(SAID)
    request = await world.service.request()
    assert await client.rest() == REFUSAL
    assert await request.broken() == CANCEL
    line = await gateway.line()
    assert line["flags"] == "UPSTREAM"
    assert "no response headers within 1 s; not asked again: no time for a pause of " in line["error"]
    await world.nothing_is_left()


async def test_a_dead_service_does_not_hold_all_places(world: World) -> None:
    routes = [
        tunnel(world.service.port, host="dead.demo.svc.cluster.local", cold_start="60s"),
        tunnel(world.service.port, tunnel="http://alive.example/_hbone/15003"),
    ]
    gateway = await world.start(*routes, max_cold_starts=2, max_retries=0)
    clients = [await world.client(hello("dead.demo.svc.cluster.local")) for _ in range(3)]
    for _ in clients:
        (await world.service.request()).respond(503, [wait("20")], end=True)
    line = await gateway.line()
    assert (line["flags"], line["status"]) == ("STATUS", 503)
    assert line["error"].endswith("; not asked again: 2 wait for it to start, the most that may")
    over = "hbone_upstream_retries_over_budget_total"
    assert await gateway.metric(over, route="dead.demo.svc.cluster.local") == 1
    assert await gateway.metric("hbone_tunnels_starting", route="dead.demo.svc.cluster.local") == 2
    assert await gateway.metric("hbone_tunnels_starting_limit") == 2
    await world.open()


async def test_dead_services_together_do_not_hold_all_places(world: World) -> None:
    dead = [f"dead{n}.demo.svc.cluster.local" for n in range(3)]
    routes = [
        tunnel(world.service.port, host=host, tunnel=f"http://dead{n}.example/_hbone/15003", cold_start="60s")
        for n, host in enumerate(dead)
    ]
    alive = tunnel(world.service.port, tunnel="http://alive.example/_hbone/15003")
    gateway = await world.start(*routes, alive, max_connections=4, max_retries=0)
    for host in dead:
        await world.client(hello(host))
        (await world.service.request()).respond(503, [wait("20")], end=True)
        if host != dead[2]:
            await waits(world, 1, host)
    line = await gateway.line()
    assert line["sni"] == dead[2]
    assert line["error"].endswith(
        "; not asked again: 2 wait for services to start, the most that may together"
    )
    await world.open()


async def test_half_of_all_places_is_the_most(world: World) -> None:
    gateway = await world.start(max_connections=10, max_cold_starts=100)
    assert await gateway.metric("hbone_tunnels_starting_limit") == 5


async def test_a_client_that_leaves_is_not_waited_for(world: World) -> None:
    gateway = await world.start(tunnel(world.service.port, cold_start="60s"))
    client = await world.client(SAID)
    (await world.service.request()).respond(503, [wait("20")], end=True)
    await waits(world, 1)
    client.reset()
    assert (await gateway.line())["flags"] == "DOWNSTREAM_RESET"
    await waits(world, 0)
    await world.nothing_is_left()
    assert not world.service.asked


async def test_a_gateway_that_stops_does_not_wait(world: World) -> None:
    gateway = await world.start(tunnel(world.service.port, cold_start="60s"), drain_timeout=0)
    client = await world.client(SAID)
    (await world.service.request()).respond(503, [wait("20")], end=True)
    await waits(world, 1)
    gateway.interrupt()
    assert await client.rest() == REFUSAL
    assert await gateway.exit_code() == 0

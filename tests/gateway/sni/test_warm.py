"""Routes with `warm: true`: what is there before the first client, and stays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.sni import warm
from shared.net.pool import dial_backoff
from tests.shared.net.loopback import until
from tests.support.gateway_world import World, tunnel
from tests.support.http2_peer import Service
from tests.support.network import free_port
from tests.support.retried_tunnels import SAID, opens
from tests.support.tcp_peer import PATIENCE_S

AUDIENCE = "https://hello.a.run.app"


def warm_route(port: int, **fields: Any) -> dict[str, Any]:
    return tunnel(port, tunnel="http://hello.example/_hbone/{port}", warm="true", **fields)


async def connections(service: Service, count: int) -> None:
    """Returns when the service has had so many."""
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: len(service.connections) >= count)


async def test_connection_and_token_are_there_before_the_first_client(world: World) -> None:
    gateway = await world.start(warm_route(world.service.port, token={"audience": AUDIENCE}))
    assert (await gateway.get("health", "/healthz/ready")).status == 200
    assert [request.audience for request in world.metadata.requests] == [AUDIENCE]
    (connection,) = world.service.connections
    assert not world.service.asked, "no stream is opened for it"
    stream = await opens(world, await world.client(SAID))
    assert stream.peer is connection
    assert stream[b"authorization"].startswith(b"Bearer ey")
    assert len(world.metadata.requests) == 1


async def test_it_stays_though_it_is_idle(world: World) -> None:
    async with Service.listening() as other:
        cold = tunnel(other.port, host="*.prod.svc.cluster.local")
        gateway = await world.start(warm_route(world.service.port), cold, upstream_idle_timeout="100ms")
        client, stream = await world.open()
        client.end()
        await stream.rest()
        stream.end()
        await client.rest()
        witness = await gateway.client(SAID.replace(b"hello.demo.", b"hello.prod."))
        (await other.request()).respond(404, end=True)
        await witness.rest()
        await other.connections[0].until(lambda: other.connections[0].lost)
        assert not world.service.connections[0].lost
        await world.echoes(*await world.open())
        assert len(world.service.connections) == 1


async def test_a_connection_that_ends_is_replaced(world: World) -> None:
    gateway = await world.start(warm_route(world.service.port))
    world.service.connections[0].drop()
    await connections(world.service, 2)
    world.service.connections[1].say_goaway(last_stream_id=0)
    await connections(world.service, 3)
    assert await gateway.metric("hbone_connections_open") == 0, "nobody has come"
    await world.echoes(*await world.open())


async def test_a_far_side_that_is_down_delays_readiness_and_no_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "READY_S", 0.1)
    monkeypatch.setattr(warm, "CHECK_S", 0.05)
    monkeypatch.setattr(dial_backoff, "MOST_S", 0.1)
    port = free_port()
    gateway = await world.start(warm_route(port))
    why = await gateway.records.match("^http://hello.example at .* is not warm: connect to .*refused")
    assert why
    await gateway.records.match("^ready$")
    async with Service.listening(port=port) as service:
        await connections(service, 1)
        await gateway.records.match("^http://hello.example at .* is warm$")


async def test_a_reload_begins_and_ends_it(world: World) -> None:
    gateway = await world.start(tunnel(world.service.port), upstream_idle_timeout="100ms")
    assert not world.service.connections
    await gateway.reloaded([warm_route(world.service.port)], upstream_idle_timeout="100ms")
    await connections(world.service, 1)
    await gateway.reloaded([tunnel(world.service.port)], upstream_idle_timeout="100ms")
    peer = world.service.connections[0]
    await peer.until(lambda: peer.lost)
    assert len(world.service.connections) == 1

"""Tunnels whose request is sent more than once: what is said, what has to arrive, and what is counted."""

from __future__ import annotations

import asyncio

from tests.support.gateway_world import GLOB, World
from tests.support.hellos import hello
from tests.support.http2_peer import PeerStream
from tests.support.tcp_peer import PATIENCE_S, TcpPeer

SAID = hello()


def wait(value: str) -> tuple[bytes, bytes]:
    return (b"retry-after", value.encode())


async def opens(world: World, client: TcpPeer) -> PeerStream:
    """The next request is answered with 200; holds that the hello comes with each request, and once."""
    stream = await world.service.request()
    assert await stream.read(len(SAID)) == SAID
    stream.respond(200)
    await world.echoes(client, stream)
    return stream


async def retries(world: World, reason: str, route: str = GLOB) -> float:
    """How often something was sent again for that reason."""
    return await world.gateway.metric("hbone_upstream_retries_total", route=route, reason=reason)


async def retried(world: World, reason: str, count: int, route: str = GLOB) -> None:
    """Returns when something was sent again so often, or is to be after a pause."""
    async with asyncio.timeout(PATIENCE_S):
        while await retries(world, reason, route) != count:
            pass


async def end(client: TcpPeer, stream: PeerStream) -> None:
    """Ends a tunnel in good order."""
    client.end()
    await stream.rest()
    stream.end()
    assert await client.rest() == b""

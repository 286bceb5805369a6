"""One tunnel's way to its 200: without a task where nothing has to be waited for, else with one.

A first tunnel has to wait for its connection. So each of these opens one before. What else may come back has
test_upstream.py, test_upstream_retries.py and test_upstream_pauses.py.
"""

from __future__ import annotations

import asyncio
import gc

from gateway.sni.tunnel import Tunnel
from shared.net.relay.relay import Relay
from shared.tasks import running
from shared.tunnel.opening import Opening
from tests.support.gateway_world import World, tunnel
from tests.support.hellos import ACCESS_DENIED, hello
from tests.support.http2_peer import PREFACE

CANCEL = 8


async def test_nothing_to_wait_for_no_task(world: World) -> None:
    await world.start()
    await world.open()
    tasks = running()
    client, stream = await world.open()
    await world.echoes(client, stream)
    assert running() == tasks


async def test_a_task_has_no_part_in_an_answer_that_is_awaited(world: World) -> None:
    gateway = await world.start()
    await world.open()
    tasks = running()
    said = hello()
    client = await world.client(said)
    stream = await world.service.request()
    assert running() == tasks
    stream.respond(200)
    assert await stream.read(len(said)) == said
    client.reset()
    assert await stream.broken() == CANCEL
    assert (await gateway.line())["flags"] == "DOWNSTREAM_RESET"


async def test_what_is_over_is_freed_at_once(world: World) -> None:
    """Without Python's search for cycles, which would have to be the more frequent."""
    gateway = await world.start()
    keeping, its = await world.open()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            client, stream = await world.open()
            await world.echoes(client, stream)
            client.end()
            assert await stream.rest() == b""
            stream.end()
            assert await client.rest() == b""
            await gateway.line()
        await world.echoes(keeping, its)
        left = [type(thing) for thing in gc.get_objects() if isinstance(thing, Tunnel | Relay | Opening)]
        assert sorted(kind.__name__ for kind in left) == ["Relay", "Tunnel"]
    finally:
        gc.enable()


# Tokens.


async def test_the_time_that_a_token_takes_does_not_count(world: World) -> None:
    """A token has deadlines of its own; the service's time begins behind it."""
    await world.start(tunnel(world.service.port, token={"audience": "x"}), response_timeout="200ms")
    world.metadata.gate.clear()
    said = hello()
    client = await world.client(said)
    await world.metadata.seen(1)
    asyncio.get_running_loop().call_later(0.4, world.metadata.gate.set)
    stream = await world.service.request()
    stream.respond(200)
    assert await stream.read(len(said)) == said
    await world.echoes(client, stream)


async def test_a_token_is_asked_for_when_the_peer_has_spoken(world: World) -> None:
    """HTTP/2 begins with SETTINGS: until then nobody knows who is there."""
    greeting = asyncio.Event()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(PREFACE))
        connected.set()
        await greeting.wait()
        writer.write(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))  # SETTINGS, empty (RFC 9113 section 6.5)
        await reader.read()
        writer.close()

    connected = asyncio.Event()
    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        gateway = await world.start(tunnel(port, token={"audience": "x"}))
        client = await world.client()
        await connected.wait()
        assert await gateway.metric("hbone_upstream_waiting", origin="http://hello.example") == 1
        assert world.metadata.requests == []
        greeting.set()
        await world.metadata.seen(1)
        client.reset()


async def test_a_401_of_a_service_that_nobody_knows_is_final_when_tokens_are_scarce(world: World) -> None:
    route = tunnel(world.service.port, token={"audience": "https://{service}.example"})
    gateway = await world.start(route, max_new_audiences_per_source=1)
    client = await world.client()
    (await world.service.request()).respond(401, end=True)
    assert await client.rest() == ACCESS_DENIED
    line = await gateway.line()
    assert (line["status"], line["flags"]) == (401, "STATUS")
    assert line["error"].startswith(
        "answered 401: the token is invalid, expired or for another audience; not "
    )
    assert "; not asked again: no token is asked for https://hello.example: " in line["error"]
    assert len(world.metadata.requests) == 1


async def test_a_service_that_answered_is_known(world: World) -> None:
    """Whatever number of tokens it then needs."""
    route = tunnel(world.service.port, token={"audience": "https://{service}.example"})
    gateway = await world.start(route, max_new_audiences_per_source=1, max_new_audiences=1)
    await world.open()
    (told,) = await gateway.dump("/tokens")
    assert told["accepted"]
    client = await world.client()
    (await world.service.request()).respond(401, end=True)
    (await world.service.request()).respond(200)
    await world.metadata.seen(2)
    assert await gateway.metric("hbone_token_entries") == 1
    assert await gateway.metric("hbone_token_new_entries") == 0
    client.reset()

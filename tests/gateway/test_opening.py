"""One tunnel's way to its 200: without a task where nothing has to be waited for, else with one.

A first tunnel has to wait for its connection. So each of these opens one before.
"""

from __future__ import annotations

import gc

from gateway.opening import Opening
from gateway.tunnel import Tunnel
from shared.net.relay import Relay
from shared.tasks import running
from tests.support.gateway_world import World
from tests.support.hellos import INTERNAL_ERROR, hello

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


async def test_another_answer_goes_on_in_a_task(world: World) -> None:
    gateway = await world.start()
    client, stream = await world.open()
    said = hello()
    second = await world.client(said)
    (await world.service.request()).respond(503, end=True)
    again = await world.service.request()
    again.respond(200)
    assert await again.read(len(said)) == said
    await world.echoes(second, again)
    await world.echoes(client, stream)
    second.end()
    again.end()
    line = await gateway.line()
    assert (line["attempts"], line["status"], line["flags"]) == (2, 200, "-")


async def test_no_answer_in_time_without_a_task(world: World) -> None:
    gateway = await world.start(response_timeout="100ms")
    await world.open()
    client = await world.client()
    stream = await world.service.request()
    assert await client.rest() == INTERNAL_ERROR
    assert await stream.broken() == CANCEL
    line = await gateway.line()
    assert (line["flags"], line["error"]) == ("UPSTREAM", "no response headers within 0.1 s")


async def test_a_broken_stream(world: World) -> None:
    gateway = await world.start()
    await world.open()
    client = await world.client()
    (await world.service.request()).reset(CANCEL)
    assert await client.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert (line["flags"], line["error"]) == ("UPSTREAM_RESET", "stream reset by the peer: CANCEL")


async def test_a_client_that_leaves_is_no_reset_before_the_answer(world: World) -> None:
    gateway = await world.start()
    await world.open()
    client = await world.client()
    stream = await world.service.request()
    client.reset()
    other, its = await world.open()  # by now the reset has been seen
    await world.echoes(other, its)
    stream.respond(200)
    assert await stream.broken() == CANCEL
    assert (await gateway.line())["flags"] == "DOWNSTREAM_RESET"


async def test_the_end_of_the_gateway_lets_go_of_what_is_awaited(world: World) -> None:
    gateway = await world.start(drain_timeout="100ms", drain_delay=0)
    await world.open()
    client = await world.client()
    stream = await world.service.request()
    gateway.terminate()
    assert await client.rest() == INTERNAL_ERROR
    assert await stream.broken() == CANCEL
    assert {line["error"] for line in await gateway.lines()} == {"the gateway stops"}


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

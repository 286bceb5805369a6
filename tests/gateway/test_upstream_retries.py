"""Tunnel requests that are sent once more at once: refused streams, dead connections, rejected tokens. The
client notices nothing, its bytes arrive once, and there is an end to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gateway_world import World, tunnel
from tests.support.hellos import ACCESS_DENIED, INTERNAL_ERROR
from tests.support.metadata_server import Answer, unsigned_token
from tests.support.retried_tunnels import SAID, end, opens, retries

CANCEL = 8
INTERNAL = 2
REFUSED_STREAM = 7


# Refused streams.


async def test_a_refused_stream_is_opened_again(world: World) -> None:
    gateway = await world.start()
    client = await world.client(SAID)
    first = await world.service.request()
    first.reset(REFUSED_STREAM)
    stream = await opens(world, client)
    assert stream[b"traceparent"] == first[b"traceparent"], "it is the same tunnel"
    await end(client, stream)
    line = await gateway.line()
    assert (line["flags"], line["status"], line["attempts"]) == ("-", 200, 2)
    assert line["stream"] == stream.number
    assert await retries(world, "refused") == 1
    await world.nothing_is_left()


async def test_a_tunnel_that_opens_at_once_has_no_attempts_in_its_line(world: World) -> None:
    await world.start()
    await end(*await world.open())
    assert "attempts" not in await world.gateway.line()


async def test_a_stream_that_goaway_leaves_out_is_opened_elsewhere(world: World) -> None:
    await world.start()
    client, stream = await world.open()
    late = await world.client(SAID)
    left_out = await world.service.request()
    left_out.peer.say_goaway(last_stream_id=stream.number)
    elsewhere = await opens(world, late)
    assert elsewhere.peer is not left_out.peer
    await world.echoes(client, stream)
    assert len(world.service.connections) == 2
    assert await retries(world, "refused") == 1


async def test_a_hundred_that_goaway_leaves_out_together(world: World) -> None:
    """More than any budget: nothing was processed, so it cost the service nothing."""
    await world.start(streams_per_connection=200)
    client, stream = await world.open()
    clients = [await world.client(SAID) for _ in range(99)]
    left_out = [await world.service.request() for _ in clients]
    left_out[0].peer.say_goaway(last_stream_id=stream.number)
    for _ in clients:
        (await world.service.request()).respond(200)
    for one in clients:
        await one.send(b"x")
    await world.echoes(client, stream)
    assert await retries(world, "refused") == 99


async def test_a_service_that_always_refuses_streams(world: World) -> None:
    gateway = await world.start(max_retries=3)
    client = await world.client(SAID)
    for _ in range(4):
        (await world.service.request()).reset(REFUSED_STREAM)
    assert await client.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert (line["flags"], line["error"], line["attempts"]) == (
        "UPSTREAM_RESET",
        "stream reset by the peer: REFUSED_STREAM",
        4,
    )
    assert not world.service.asked


async def test_nobody_is_left_to_ask(world: World) -> None:
    gateway = await world.start()
    client = await world.client(SAID)
    refused = await world.service.request()
    world.service.stop_listening()
    refused.peer.say_goaway(last_stream_id=0)
    assert await client.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert (line["flags"], line["attempts"]) == ("CONNECT", 2)
    assert "status" not in line


# Dead connections.


async def test_a_dead_pooled_connection_is_replaced(world: World) -> None:
    gateway = await world.start()
    await end(*await world.open())
    assert (await gateway.line())["flags"] == "-"
    client = await world.client(SAID)
    on_dead = await world.service.request()
    on_dead.peer.drop()
    stream = await opens(world, client)
    assert stream.peer is not on_dead.peer
    await end(client, stream)
    assert (await gateway.line())["attempts"] == 2
    assert await retries(world, "connection_lost") == 1
    await world.nothing_is_left()


async def test_all_pooled_connections_are_dead(world: World) -> None:
    """Each is found out by the request that it loses; `max_retries` is no reason to stop among them."""
    await world.start(streams_per_connection=1, max_retries=1)
    for tunnel_ in [await world.open() for _ in range(4)]:
        await end(*tunnel_)
        assert (await world.gateway.line())["flags"] == "-"
    assert len(world.service.connections) == 4
    client = await world.client(SAID)
    for _ in range(4):
        (await world.service.request()).peer.drop()
    await opens(world, client)
    assert await retries(world, "connection_lost") == 4


async def test_a_new_connection_that_is_lost_too(world: World) -> None:
    gateway = await world.start()
    await end(*await world.open())
    await gateway.line()
    client = await world.client(SAID)
    for _ in range(2):
        (await world.service.request()).peer.drop()
    assert await client.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert (line["flags"], line["attempts"]) == ("UPSTREAM_RESET", 2)
    assert not world.service.asked


@pytest.mark.parametrize("code", [CANCEL, INTERNAL])
async def test_a_stream_that_is_reset_otherwise_is_final(world: World, code: int) -> None:
    gateway = await world.start()
    await end(*await world.open())
    await gateway.line()
    client = await world.client(SAID)
    (await world.service.request()).reset(code)
    assert await client.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert line["flags"] == "UPSTREAM_RESET"
    assert "attempts" not in line


# Tokens.


async def test_a_401_is_answered_with_a_new_token(world: World) -> None:
    gateway = await world.start(tunnel(world.service.port, token={"audience": "x"}))
    clients = [await world.client(SAID) for _ in range(5)]
    streams = [await world.service.request() for _ in clients]
    old = {stream[b"authorization"] for stream in streams}
    for stream in streams:
        stream.respond(401, end=True)
    again = [await world.service.request() for _ in clients]
    new = {stream[b"authorization"] for stream in again}
    for stream in again:
        stream.respond(200)
        assert await stream.read(len(SAID)) == SAID
    assert len(old) == len(new) == 1 and old != new
    assert len(world.metadata.requests) == 2, "five refusals of one token cost one new token"
    assert await retries(world, "token") == 5
    assert await gateway.refused() == {}


async def test_a_second_401_is_the_answer(world: World) -> None:
    gateway = await world.start(tunnel(world.service.port, token={"audience": "x"}))
    client = await world.client(SAID)
    for _ in range(2):
        (await world.service.request()).respond(401, end=True)
    assert await client.rest() == ACCESS_DENIED
    line = await gateway.line()
    assert (line["flags"], line["status"], line["attempts"]) == ("STATUS", 401, 2)
    assert not world.service.asked
    await opens(world, await world.client(SAID))
    assert len(world.metadata.requests) == 2, "the second token is not the one to blame"


async def test_a_metadata_server_that_sticks_to_its_token(world: World) -> None:
    token = unsigned_token(exp=1 << 40)
    world.metadata.answer = lambda _: Answer(token.encode())
    gateway = await world.start(tunnel(world.service.port, token={"audience": "x"}))
    client = await world.client(SAID)
    (await world.service.request()).respond(401, end=True)
    assert await client.rest() == ACCESS_DENIED
    assert "attempts" not in await gateway.line()
    assert len(world.metadata.requests) == 2
    assert not world.service.asked


async def test_no_new_token_is_to_be_had(world: World) -> None:
    gateway = await world.start(tunnel(world.service.port, token={"audience": "x"}))
    client = await world.client(SAID)
    stream = await world.service.request()
    world.metadata.answer = lambda _: Answer(b"", 500)
    stream.respond(401)
    assert await client.rest() == INTERNAL_ERROR
    assert await stream.broken() == CANCEL
    line = await gateway.line()
    assert (line["flags"], line["status"]) == ("IDENTITY_ERROR", 401)
    await world.nothing_is_left()


@pytest.mark.parametrize("token", ["none", {"file": "token"}])
async def test_a_401_with_nothing_else_to_show(world: World, tmp_path: Path, token: object) -> None:
    (tmp_path / "token").write_text("opaque")
    gateway = await world.start(tunnel(world.service.port, token=token))
    client = await world.client(SAID)
    (await world.service.request()).respond(401, end=True)
    assert await client.rest() == ACCESS_DENIED
    assert (await gateway.line())["status"] == 401
    assert not world.service.asked


async def test_a_token_file_that_was_renewed_meanwhile(world: World, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("old")
    await world.start(tunnel(world.service.port, token={"file": "token"}))
    client = await world.client(SAID)
    stream = await world.service.request()
    (tmp_path / "token").write_text("new")
    stream.respond(401, end=True)
    assert (await opens(world, client))[b"authorization"] == b"Bearer new"

"""The ClientHello goes with the tunnel request: far sides that answer when the body has begun, and some that
never read it."""

from __future__ import annotations

import h2.settings
import pytest

from tests.support.gateway_world import World
from tests.support.hellos import INTERNAL_ERROR
from tests.support.http2_peer import PeerStream
from tests.support.retried_tunnels import SAID, end, opens
from tests.support.tcp_peer import TcpPeer

NO_ERROR = 0
ECHOED = len(b"hello")
INITIAL_WINDOW = h2.settings.SettingCodes.INITIAL_WINDOW_SIZE


async def begun(world: World) -> PeerStream:
    """The next request, of whose body the ClientHello has come."""
    stream = await world.service.request()
    assert await stream.read(len(SAID)) == SAID
    return stream


@pytest.mark.parametrize("status", [429, 502, 503])
async def test_a_far_side_that_answers_when_the_body_has_begun_is_asked_again(
    world: World, status: int
) -> None:
    gateway = await world.start()
    client = await world.client(SAID)
    refused = await begun(world)
    refused.respond(status, end=True)
    refused.reset(NO_ERROR)  # RFC 9113 section 8.1: the rest of the body is not wanted
    await end(client, await opens(world, client))
    line = await gateway.line()
    assert (line["flags"], line["status"], line["attempts"]) == ("-", 200, 2)
    assert line["bytes_sent"] == len(SAID) + ECHOED, "the ClientHello is counted once"
    await world.nothing_is_left()


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_refusal_when_the_body_has_begun_is_the_answer(world: World, status: int) -> None:
    gateway = await world.start()
    client = await world.client(SAID)
    refused = await begun(world)
    refused.respond(status)
    await refused.send(b"no")
    refused.end()
    assert (await client.rest())[:1] == b"\x15", "a TLS alert, and no byte of the page"
    line = await gateway.line()
    assert line["status"] == status
    assert "bytes_sent" not in line
    assert not world.service.asked
    await world.nothing_is_left()


async def without_windows(world: World) -> tuple[TcpPeer, PeerStream]:
    """An open tunnel, on whose connection new streams have no window."""
    client, stream = await world.open()
    stream.peer.act(lambda h2: h2.update_settings({INITIAL_WINDOW: 0}))
    stream.peer.act(lambda h2: h2.increment_flow_control_window(1 << 20, stream.number))
    await world.echoes(client, stream)
    return client, stream


async def test_a_far_side_that_reads_nothing_before_it_has_answered(world: World) -> None:
    await world.start()
    await without_windows(world)
    client = await world.client(SAID)
    stream = await world.service.request()
    await stream.peer.answered()
    assert stream.data == b""
    stream.respond(200)
    stream.peer.act(lambda h2: h2.increment_flow_control_window(1 << 20, stream.number))
    assert await stream.read(len(SAID)) == SAID
    await world.echoes(client, stream)


async def test_a_far_side_that_reads_nothing_and_refuses(world: World) -> None:
    gateway = await world.start(max_retries=0)
    witness, witnessed = await without_windows(world)
    client = await world.client(SAID)
    stream = await world.service.request()
    stream.respond(503, end=True)
    assert await client.rest() == INTERNAL_ERROR
    assert (await gateway.line())["status"] == 503
    await world.echoes(witness, witnessed)
    await end(witness, witnessed)
    await world.nothing_is_left()

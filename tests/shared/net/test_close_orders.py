"""Every order of FIN and RST at both ends of a whole tunnel, before, during and after data, byte for byte."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from h2.connection import H2Connection
from h2.errors import ErrorCodes

from shared.errors import StreamResetError
from shared.net.relay.relay import Relay
from tests.shared.net.loopback import ACKNOWLEDGED_S, FIN, RST, Peer, World, until
from tests.support.http2_peer import PeerStream, Service

UP = random.Random(1).randbytes(300_000)
DOWN = random.Random(2).randbytes(300_000)
"""Several reads and many frames: what a whole tunnel never holds at once."""

sizes = pytest.mark.parametrize(
    ("up", "down"),
    [(0, 0), (5, 7), (len(UP), 0), (0, len(DOWN)), (len(UP), len(DOWN))],
    ids=["nothing", "a few bytes", "much up", "much down", "much both ways"],
)


class Ends:
    """A client and its app, both sending already."""

    def __init__(self, client: Peer, app: Peer, up: int, down: int) -> None:
        self.client = client
        self.app = app
        self.up = UP[:up]
        self.down = DOWN[:down]
        client.start_reading()
        app.start_reading()
        client.send_soon(self.up)
        app.send_soon(self.down)

    async def client_fin(self) -> None:
        await self.client.all_sent()
        self.client.fin()

    async def app_fin(self) -> None:
        await self.app.all_sent()
        self.app.fin()

    async def app_has_all(self) -> bool:
        return await self.app.ended() == FIN and bytes(self.app.received) == self.up

    async def client_has_all(self) -> bool:
        return await self.client.ended() == FIN and bytes(self.client.received) == self.down

    async def app_is_reset(self) -> bool:
        """What came by then is the beginning of what was sent."""
        return await self.app.ended() == RST and self.up.startswith(self.app.received)

    async def client_is_reset(self) -> bool:
        return await self.client.ended() == RST and self.down.startswith(self.client.received)


async def client_first(ends: Ends) -> None:
    await ends.client_fin()
    assert await ends.app_has_all()
    await ends.app_fin()
    assert await ends.client_has_all()


async def app_first(ends: Ends) -> None:
    await ends.app_fin()
    assert await ends.client_has_all()
    await ends.client_fin()
    assert await ends.app_has_all()


async def both_at_once(ends: Ends) -> None:
    await ends.client_fin()
    await ends.app_fin()
    assert await ends.client_has_all()
    assert await ends.app_has_all()


@sizes
@pytest.mark.parametrize("story", [client_first, app_first, both_at_once])
async def test_orderly_ends(story: Callable[[Ends], Awaitable[None]], up: int, down: int) -> None:
    async with World.running() as world:
        client, app = await world.tunnel()
        await story(Ends(client, app, up, down))
        await world.over()
        for relay in world.gateway_relays + world.agent_relays:
            assert (relay.error, relay.sent_bytes, relay.received_bytes) == (None, up, down)


@sizes
@pytest.mark.parametrize("ended", ["neither", "the app"])
async def test_the_client_resets_before_it_has_ended(ended: str, up: int, down: int) -> None:
    async with World.running() as world:
        client, app = await world.tunnel()
        ends = Ends(client, app, up, down)
        await until(lambda: bool(world.agent_relays))
        if ended == "the app":
            await ends.app_fin()
            assert await ends.client_has_all()
        await client.rst()
        assert await ends.app_is_reset()
        await world.over()
        broke(world.gateway_relays[0], downstream=True)
        if ended == "the app":  # as far as the agent can tell, the gateway wanted no more than it got
            assert world.agent_relays[0].error is None
        else:
            broke(world.agent_relays[0], downstream=True)


@sizes
@pytest.mark.parametrize("ended", ["neither", "the client"])
async def test_the_app_resets_before_it_has_ended(ended: str, up: int, down: int) -> None:
    async with World.running() as world:
        client, app = await world.tunnel()
        ends = Ends(client, app, up, down)
        if ended == "the client":
            await ends.client_fin()
            assert await ends.app_has_all()
        await app.rst()
        assert await ends.client_is_reset()
        await world.over()
        broke(world.gateway_relays[0], downstream=False)
        broke(world.agent_relays[0], downstream=False)


@sizes
async def test_the_app_resets_after_it_has_ended(up: int, down: int) -> None:
    """An app that answers in full, closes, and gets more: the answer is not lost."""
    async with World.running() as world:
        client, app = await world.tunnel()
        ends = Ends(client, app, up, down)
        await ends.app_fin()
        assert await ends.client_has_all()
        await client.all_sent()
        await until(lambda: len(app.received) == up)
        await app.rst()
        await client.send(b"one thing more")
        client.fin()
        await world.over()
        assert [relay.error for relay in world.gateway_relays + world.agent_relays] == [None, None]


@sizes
async def test_the_app_closes_with_data_unread(up: int, down: int) -> None:
    """The kernel makes RST of that: what the app sent before it still arrives, if the app has sent FIN."""
    async with World.running() as world:
        client, app = await world.tunnel()
        app.send_soon(DOWN[:down])
        await client.send(b"never read")
        client.start_reading()
        await app.all_sent()
        await until(lambda: len(client.received) == down)
        app.fin()
        assert await client.ended() == FIN
        await app.close()
        client.send_soon(UP[:up])
        await client.all_sent()
        client.fin()
        await world.over()
        assert bytes(client.received) == DOWN[:down]
        assert [relay.error for relay in world.gateway_relays + world.agent_relays] == [None, None]


@sizes
async def test_the_client_is_gone_after_it_has_ended(up: int, down: int) -> None:
    """A client that sends its last words and exits: they arrive, and so does their end."""
    async with World.running() as world:
        client, app = await world.tunnel()
        ends = Ends(client, app, up, 0)
        await ends.client_fin()
        await client.close()
        assert await ends.app_has_all()
        app.send_soon(DOWN[:down])
        await app.all_sent()
        app.fin()
        await world.over()
        assert [relay.error for relay in world.gateway_relays + world.agent_relays] == [None, None]


async def test_half_close_with_the_answer_after_it() -> None:
    async with World.running() as world:
        client, app = await world.tunnel()
        await client.send(b"question")
        client.fin()
        assert await app.ended() == FIN
        assert bytes(app.received) == b"question"
        for piece in (b"a", b"long", b"answer"):
            await app.send(piece)
            assert await client.read(len(piece)) == piece
        app.fin()
        assert await client.ended() == FIN
        await world.over()


async def test_a_target_that_speaks_first() -> None:
    async with World.running() as world:
        client, app = await world.tunnel()
        await app.send(b"220 hello\r\n")
        assert await client.read(11) == b"220 hello\r\n"
        client.fin()
        app.fin()
        await world.over()


async def test_one_connection_through_all_of_it() -> None:
    """No window leaks: after many tunnels that ended badly the connection still carries more than its own."""
    async with World.running() as world:
        for turn in range(24):
            client, app = await world.tunnel()
            client.send_soon(UP)
            app.send_soon(DOWN)
            await until(lambda turn=turn: len(world.agent_relays) == turn + 1)  # type: ignore[misc]  # a default
            await (client.rst() if turn % 2 else app.rst())
            await world.over()
        (origin_pool,) = world.pool.origins.values()
        assert len(origin_pool.connections) == 1
        client, app = await world.tunnel()
        client.start_reading()
        app.start_reading()
        for _ in range(60):
            client.send_soon(UP)
            await client.all_sent()
            app.send_soon(DOWN)
            await app.all_sent()
        client.fin()
        app.fin()
        assert await client.ended() == FIN
        assert await app.ended() == FIN
        assert (bytes(app.received), bytes(client.received)) == (UP * 60, DOWN * 60)
        await world.over()


# A service played by h2, which can do what no TCP app can.


def respond_in_full(stream: PeerStream, body: bytes, then: Callable[[H2Connection], None]) -> None:
    """Response, body, END_STREAM and what comes `then`, in one write."""

    def say(h2: H2Connection) -> None:
        h2.send_headers(stream.number, [(b":status", b"200")])
        for at in range(0, len(body), 16384):
            h2.send_data(stream.number, body[at : at + 16384])
        h2.end_stream(stream.number)
        then(h2)

    stream.peer.act(say)


@pytest.mark.parametrize("code", [ErrorCodes.NO_ERROR, ErrorCodes.CANCEL, ErrorCodes.INTERNAL_ERROR])
@pytest.mark.parametrize("size", [0, 5, len(DOWN)])
async def test_a_response_in_full_and_then_a_reset(size: int, code: ErrorCodes) -> None:
    async with Service.listening() as service, World.running(service=service.port) as world:
        client = await world.client()
        await client.send(b"request")
        stream = await service.request()
        respond_in_full(stream, DOWN[:size], lambda h2: h2.reset_stream(stream.number, code))
        assert await client.ended() == FIN
        assert bytes(client.received) == DOWN[:size]
        await client.send(b"nobody reads this, and nobody minds")
        client.fin()
        await world.over()
        (relay,) = world.gateway_relays
        assert (relay.error, relay.received_bytes) == (None, size)


async def test_a_response_in_full_and_then_the_connection_is_lost() -> None:
    async with Service.listening() as service, World.running(service=service.port) as world:
        client = await world.client()
        stream = await service.request()
        respond_in_full(stream, DOWN, lambda h2: None)
        assert await client.ended() == FIN
        stream.peer.drop()
        await until(lambda: not world.pool.origins)
        await client.send(b"nobody reads this")
        client.fin()
        await world.over()
        assert bytes(client.received) == DOWN
        assert world.gateway_relays[0].error is None


async def test_a_reset_before_the_end() -> None:
    async with Service.listening() as service, World.running(service=service.port) as world:
        client = await world.client()
        stream = await service.request()
        stream.respond(200)
        await stream.send(DOWN[:1000])
        assert await client.read(1000) == DOWN[:1000]
        stream.reset(ErrorCodes.NO_ERROR)
        assert await client.ended() == RST, "even NO_ERROR says that there would have been more"
        await world.over()
        broke(world.gateway_relays[0], downstream=False)
        assert str(world.gateway_relays[0].error) == "stream reset by the peer: NO_ERROR"


async def test_a_connection_lost_before_the_end() -> None:
    async with Service.listening() as service, World.running(service=service.port) as world:
        client = await world.client()
        stream = await service.request()
        stream.respond(200)
        await until(lambda: bool(world.gateway_relays))
        stream.peer.drop()
        assert await client.ended() == RST
        await world.over()
        error = str(world.gateway_relays[0].error)
        assert error.startswith(f"connection to 127.0.0.1:{service.port} lost: "), error


def broke(relay: Relay, *, downstream: bool) -> None:
    """Checks that the relay knows which of its legs broke."""
    assert isinstance(relay.error, StreamResetError)
    assert relay.broken is (relay.downstream if downstream else relay.upstream)


async def test_a_response_in_full_from_a_service_that_is_gone_while_we_write() -> None:
    """Its connection's FIN and RST are there before we have read the response: the next write fails."""
    async with Service.listening() as service, World.running(service=service.port) as world:
        client = await world.client()
        stream = await service.request()
        stream.respond(200)
        await until(lambda: bool(world.gateway_relays))
        (end,) = world.ends
        assert end._transport is not None
        end._transport.pause_reading()  # as if the loop had yet to come round to it
        body = DOWN[:50_000]  # as much as the kernel takes for us
        await stream.send(body)
        stream.end()
        stream.peer._transport.write_eof()
        await asyncio.sleep(ACKNOWLEDGED_S)
        stream.peer.drop()
        for _ in range(3):
            await client.send(b"one thing more")
            await asyncio.sleep(0.01)
        assert await client.ended() == FIN
        assert bytes(client.received) == body


@pytest.mark.parametrize("size", [0, len(DOWN)])
async def test_trailers_end_a_tunnel_like_any_end(size: int) -> None:
    async with Service.listening() as service, World.running(service=service.port) as world:
        client = await world.client()
        stream = await service.request()
        stream.respond(200)
        await stream.send(DOWN[:size])
        stream.end([(b"grpc-status", b"0")])
        assert await client.ended() == FIN
        assert bytes(client.received) == DOWN[:size]
        client.fin()
        await world.over()
        assert world.gateway_relays[0].error is None


async def test_a_slow_reader_gets_everything_after_both_have_ended() -> None:
    """What is on its way does not end with the tunnel."""
    async with World.running(buffer_bytes=1 << 16) as world:
        client, app = await world.tunnel()
        client.fin()
        app.send_soon(DOWN * 3)
        app.start_reading()
        await app.all_sent()
        app.fin()
        assert await app.ended() == FIN
        await until(lambda: world.agent_relays[0].over)
        assert await client.ended() == FIN
        assert bytes(client.received) == DOWN * 3

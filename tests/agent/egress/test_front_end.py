"""krun's way to the gateway by POST: hgate's real tunnel port, and front ends that answer something else."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.config.egress_settings import GatewayUrl
from gateway.rules.hbone_rules import Rule
from shared.address import Address
from shared.errors import Flag
from shared.tasks import spawn
from tests.support.egress_world import EgressWorld, egress_world
from tests.support.hbone_port import CALLER, TO_LOOPBACK
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.metadata_server import Answer as MetadataAnswer
from tests.support.metadata_server import MetadataServer, Request, closed_port, unsigned_token
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer, turned_away

BIG = os.urandom(8 << 20)


def local(world: EgressWorld) -> int:
    return world.egress.ports[0].listen.port


async def opened(world: EgressWorld) -> tuple[TcpPeer, TcpPeer]:
    """Both ends of a tunnel."""
    client = await TcpPeer.connect(local(world))
    world.clients.append(client)
    return client, await world.target.accept()


async def test_a_tunnel_by_post(tmp_path: Path) -> None:
    async with egress_world(tmp_path, by_post=True) as world:
        client, there = await opened(world)
        await client.send(b"ping")
        assert await there.read(4) == b"ping"
        client.end()
        assert await there.rest() == b""
        await there.send(b"after the end")
        there.end()
        assert await client.rest() == b"after the end"
        record = await world.record()
        assert (record.flag, record.status, record.route) == (Flag.NONE, 200, "egress/local")
        line = await world.gateway.line()
        assert (line["identity"], line["traceparent"]) == (str(CALLER), record.traceparent)
        assert set(world.looked_up) == {"gateway.test"}
        shown = world.egress.shown()
        assert (shown["gateway"]["connections"], shown["front_end"]["connections"]) == (1, 1)


async def test_many_tunnels_share_what_carries_them(tmp_path: Path) -> None:
    async with egress_world(tmp_path, by_post=True) as world:
        ends = [await opened(world) for _ in range(150)]
        for client, there in ends:
            await client.send(b"x")
            assert await there.read(1) == b"x"
        shown = world.egress.shown()
        assert 2 <= shown["gateway"]["connections"] <= 3
        assert shown["front_end"]["connections"] == 1


async def test_much_both_ways_beside_one_that_does_not_read(tmp_path: Path) -> None:
    async with egress_world(tmp_path, by_post=True) as world:
        slow, stalled = await opened(world)
        blocked = [spawn(slow.send(BIG), name="there"), spawn(stalled.send(BIG), name="back")]
        client, there = await opened(world)
        sending = [spawn(client.send(BIG), name="there"), spawn(there.send(BIG), name="back")]
        assert hashlib.sha256(await there.read(len(BIG))).digest() == hashlib.sha256(BIG).digest()
        assert hashlib.sha256(await client.read(len(BIG))).digest() == hashlib.sha256(BIG).digest()
        await asyncio.gather(*sending)
        assert await stalled.read(len(BIG)) == BIG
        assert await slow.read(len(BIG)) == BIG
        await asyncio.gather(*blocked)


async def test_hgate_denies_by_identity(tmp_path: Path) -> None:
    deny = Rule((str(CALLER),), ("*:*",), deny=True)
    async with egress_world(tmp_path, deny, TO_LOOPBACK, by_post=True) as world:
        code, text = await world.curl("-x", f"http://127.0.0.1:{world.proxy}", "http://127.0.0.1:9/")
        assert (code, "denies it" in text) == (0, True), text
        assert (await world.gateway.line())["flags"] == "DENY"


async def test_a_gateway_of_another_name_is_refused(tmp_path: Path) -> None:
    async with egress_world(tmp_path, by_post=True, peers=("spiffe://demo.local/ns/x/sa/y",)) as world:
        await turned_away(local(world))
        assert "denied" in str((await world.record()).error)


async def test_hgate_drains_and_open_tunnels_go_on(tmp_path: Path) -> None:
    async with egress_world(tmp_path, by_post=True) as world:
        client, there = await opened(world)
        await world.gateway.listener.drain()
        await client.send(b"last words")
        assert await there.read(10) == b"last words"
        client.end()
        there.end()
        assert await client.rest() == b""
        assert (await world.record()).flag is Flag.NONE
        await turned_away(local(world))  # nobody is there any more


Answer = Callable[[PeerStream], None]


@asynccontextmanager
async def front_end(answer: Answer) -> AsyncIterator[GatewayUrl]:
    """A front end without TLS that answers each request so."""
    peers: list[Http2Peer] = []

    def made() -> Http2Peer:
        peers.append(peer := Http2Peer(client=False, requested=answer))
        return peer

    server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield GatewayUrl("http", Address("gateway.test", port), "/_hbone/15008")
    finally:
        server.close()
        for peer in peers:
            await peer.close()


def with_page(status: int, *fields: tuple[bytes, bytes]) -> Answer:
    def answer(stream: PeerStream) -> None:
        stream.respond(status, [(b"content-type", b"text/html"), *fields], end=True)

    return answer


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (
            with_page(401),
            "answered 401: it lets nobody in without a token: HBONE_EGRESS_AUDIENCE asks for one",
        ),
        (
            with_page(403),
            "answered 403: it lets nobody in without a token: HBONE_EGRESS_AUDIENCE asks for one",
        ),
        (with_page(404), "answered 404: it has no route for this path, or what is behind it is not hgate's"),
        (
            with_page(302, (b"location", b"https://login.test/")),
            "answered 302 to https://login.test/: krun follows no redirect; is that a page to log in?",
        ),
        (with_page(502), "answered 502: it does not reach hgate's tunnel_listen: does it speak HTTP/2"),
        (with_page(200), "answered 200 with 'text/html': that is a page, and no tunnel of hgate's"),
        (lambda stream: stream.reset(8), "stream reset by the peer: CANCEL"),
    ],
    ids=["401", "403", "404", "redirect", "502", "page", "reset"],
)
async def test_what_a_front_end_says_instead(tmp_path: Path, answer: Answer, error: str) -> None:
    async with (
        front_end(answer) as url,
        egress_world(tmp_path, gateway=url) as world,
    ):
        code, text = await world.curl(
            "-w", "%{http_code}", "-x", f"http://127.0.0.1:{world.proxy}", "http://127.0.0.1:9/"
        )
        assert (code, text[-3:]) == (0, "502"), text
        told = str((await world.record()).error)
        assert told.startswith(f"{url}: ") and error in told
        assert "\n" not in told


async def test_a_front_end_that_is_no_tls_end(tmp_path: Path) -> None:
    """It says 200 and sends what is no TLS."""

    def answer(stream: PeerStream) -> None:
        stream.respond(200)
        stream.peer.act(lambda h2: h2.send_data(stream.number, b"hello", end_stream=True))

    async with front_end(answer) as url, egress_world(tmp_path, gateway=url) as world:
        await turned_away(local(world))
        assert "TLS failed" in str((await world.record()).error)


async def test_one_that_cuts_its_streams_costs_the_tunnels_in_them(tmp_path: Path) -> None:
    """And the next one is carried anew."""
    async with egress_world(tmp_path, by_post=True) as world:
        client, there = await opened(world)
        await client.send(b"x")
        assert await there.read(1) == b"x"
        for connection in list(world.gateway.listener._posts._connections):
            for state in list(connection.session.streams.values()):
                connection.reset(state, 8)
        assert await client.was_reset()
        assert (await world.record()).flag is Flag.UPSTREAM_RESET
        client, there = await opened(world)
        await client.send(b"y")
        assert await there.read(1) == b"y"


async def test_nobody_is_there(tmp_path: Path) -> None:
    async with TcpServer.listening() as server:
        port = server.port
    url = GatewayUrl("http", Address("gateway.test", port), "/_hbone/15008")
    async with egress_world(tmp_path, gateway=url, timeout_s=PATIENCE_S) as world:
        await turned_away(local(world))
        assert "connection refused" in str((await world.record()).error)


async def test_the_front_end_gets_a_token_and_hgate_does_not(tmp_path: Path) -> None:
    """A new one after a 401, once."""
    seen: list[bytes] = []

    def answer(stream: PeerStream) -> None:
        seen.append(dict(stream.fields).get(b"authorization", b""))
        stream.respond(401, end=True)

    def mint(request: Request) -> MetadataAnswer:
        serial = len(minted)
        minted.append(unsigned_token(aud=request.audience, exp=time.time() + 3600, serial=serial))
        return MetadataAnswer(minted[-1].encode())

    minted: list[str] = []
    async with (
        MetadataServer(mint) as metadata,
        front_end(answer) as url,
        egress_world(
            tmp_path, gateway=url, audience="https://front.test", metadata_host=metadata.host
        ) as world,
    ):
        await turned_away(local(world))
        error = str((await world.record()).error)
    assert "answered 401: it does not accept the token: is HBONE_EGRESS_AUDIENCE its audience?" in error
    assert seen == [b"Bearer " + token.encode() for token in minted]
    assert len(seen) == 2


async def test_without_a_token_source_there_is_no_post(tmp_path: Path) -> None:
    seen: list[PeerStream] = []
    async with front_end(seen.append) as url:
        host = f"127.0.0.1:{closed_port()}"
        async with egress_world(tmp_path, gateway=url, audience="x", metadata_host=host) as world:
            await turned_away(local(world))
            assert "no metadata server" in str((await world.record()).error)
    assert seen == []

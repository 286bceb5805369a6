"""hgate before a real Envoy that does not take a tunnel at first: the client notices nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.address import Address
from tests.path.programs import envoy
from tests.support import gateway_world
from tests.support.envoy_config import TYPES, Json, bootstrap, cluster_of, http_chain
from tests.support.gateway_world import World, tunnel
from tests.support.hellos import hello
from tests.support.retried_tunnels import retries
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer

_ALWAYS = {"default_value": {"numerator": 100, "denominator": "HUNDRED"}}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with gateway_world.world(tmp_path) as world:
        yield world


def front(app: Address, *filters: Json) -> Json:
    """An Envoy that takes h2c POSTs of tunnels to `app`, with these HTTP filters before the last."""
    connect = {"upgrade_configs": [{"upgrade_type": "CONNECT", "connect_config": {"allow_post": True}}]}
    route = {"match": {"prefix": "/_hbone/"}, "route": {"cluster": "app", "timeout": "0s", **connect}}
    chain = http_chain(
        "front",
        [route],
        before=filters,
        codec_type="HTTP2",
        http2_protocol_options={"allow_connect": True},
        upgrade_configs=[{"upgrade_type": "CONNECT"}],
    )
    return bootstrap(chain, cluster_of("app", app))


def one_a_second() -> Json:
    """Lets one request a second pass, and tells the others to come back after it."""
    return {
        "name": "envoy.filters.http.local_ratelimit",
        "typed_config": {
            "@type": f"{TYPES}.filters.http.local_ratelimit.v3.LocalRateLimit",
            "stat_prefix": "front",
            "token_bucket": {"max_tokens": 1, "tokens_per_fill": 1, "fill_interval": "1s"},
            "filter_enabled": _ALWAYS,
            "filter_enforced": _ALWAYS,
            "response_headers_to_add": [{"header": {"key": "retry-after", "value": "1"}}],
        },
    }


async def carries(client: TcpPeer, app: TcpPeer, said: bytes) -> None:
    """Holds that all arrives once, the hello first."""
    assert await app.read(len(said)) == said
    await client.send(b"there")
    assert await app.read(5) == b"there"
    await app.send(b"and back")
    app.end()
    assert await client.rest() == b"and back"
    client.end()
    assert await app.rest() == b""


async def test_too_many_requests(world: World, tmp_path: Path) -> None:
    async with TcpServer.listening() as app:
        with envoy("front", front(Address("127.0.0.1", app.port), one_a_second()), tmp_path) as address:
            gateway = await world.start(tunnel(address.port))
            said = hello()
            clients = [await world.client(said) for _ in range(2)]
            for client in clients:
                client.send_soon(b"early")
            for _ in clients:
                peer = await app.accept()
                # Which of the two comes first is not for us to know; both have said the same.
                assert await peer.read(len(said) + 5) == said + b"early"
                peer.end()
            for client in clients:
                assert await client.rest() == b""
                client.end()
            lines = [await gateway.line() for _ in clients]
            assert [line["flags"] for line in lines] == ["-", "-"]
            assert sorted(line.get("attempts", 1) for line in lines)[1] >= 2
            assert await retries(world, "429") >= 1


async def test_an_app_that_does_not_listen_yet(world: World, tmp_path: Path) -> None:
    """Envoy says 503 as long as it cannot connect, as krun does."""
    with socket.socket() as later:
        later.bind(("127.0.0.1", 0))
        address_of_app = Address("127.0.0.1", later.getsockname()[1])
        with envoy("front", front(address_of_app), tmp_path) as address:
            gateway = await world.start(tunnel(address.port))
            said = hello()
            client = await world.client(said)
            async with asyncio.timeout(PATIENCE_S):
                while not await retries(world, "503"):
                    pass
            later.listen()
            later.setblocking(False)
            async with asyncio.timeout(PATIENCE_S):
                accepted, _ = await asyncio.get_running_loop().sock_accept(later)
            app = TcpPeer(*await asyncio.open_connection(sock=accepted))
            await carries(client, app, said)
            line = await gateway.line()
            assert (line["flags"], line["status"]) == ("-", 200)
            assert line["attempts"] >= 2
            await app.close()

"""Connections that are passed on as they are: from the hello to two sockets, and what goes wrong there."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from gateway.rules.routes import Route, RouteTable
from gateway.sni.forward import check_alpn
from shared.address import Address
from shared.errors import AlpnError
from shared.tls import istio_sni
from tests.support.gateway_world import GLOB, World
from tests.support.hellos import INTERNAL_ERROR, NAME, alert, hello
from tests.support.network import unanswering
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer

ISTIOD = "istiod.istio-system.svc"
NO_APPLICATION_PROTOCOL = alert(120)
MUCH = bytes(range(256)) * (16 << 12)
"""16 MiB: more than all buffers on the way hold."""


def forward(port: int, host: str = ISTIOD, **fields: Any) -> dict[str, Any]:
    return {"host": host, "forward": f"127.0.0.1:{port}"} | fields


async def opened(world: World, server: TcpServer) -> tuple[TcpPeer, TcpPeer]:
    """A client and its upstream, from which the hello is taken."""
    said = hello(ISTIOD)
    client = await world.client(said)
    upstream = await server.accept()
    assert await upstream.read(len(said)) == said
    return client, upstream


# The record of a spliced tunnel.


async def test_it_is_counted_and_shown_while_it_is_open(world: World, target: TcpServer) -> None:
    gateway = await world.start(forward(target.port))
    client, upstream = await opened(world, target)
    await upstream.send(b"answer")
    assert await client.read(6) == b"answer"
    [shown] = await gateway.dump("/tunnels")
    assert (shown["src.addr"], shown["sni"], shown["route"]) == (client.address, ISTIOD, ISTIOD)
    assert shown["dst.addr"] == f"127.0.0.1:{target.port}"
    assert (shown["bytes_sent"], shown["bytes_recv"]) == (len(hello(ISTIOD)), 6)
    assert await gateway.metric("hbone_tunnels_open", route=ISTIOD) == 1
    assert await gateway.metric("hbone_sent_bytes_total", route=ISTIOD) == len(hello(ISTIOD))
    assert await gateway.metric("hbone_received_bytes_total", route=ISTIOD) == 6
    await upstream.send(MUCH[: 1 << 20])
    upstream.end()
    assert await client.rest() == MUCH[: 1 << 20]
    await client.send(b"after its end")
    client.end()
    assert await upstream.rest() == b"after its end"
    line = await gateway.line()
    assert (line["flags"], line["route"]) == ("-", ISTIOD)
    assert line["dst.addr"] == f"127.0.0.1:{target.port}"
    received = 6 + (1 << 20)
    assert (line["bytes_sent"], line["bytes_recv"]) == (len(hello(ISTIOD)) + 13, received)
    assert not {"origin", "status", "stream"} & line.keys()
    assert await gateway.metric("hbone_tunnels_closed_total", route=ISTIOD, flags="-") == 1
    assert await gateway.metric("hbone_received_bytes_total", route=ISTIOD) == received, "each byte once"
    assert world.metadata.requests == []
    await world.nothing_is_left()


@pytest.mark.parametrize("breaker", ["client", "upstream"])
async def test_who_breaks_it(world: World, breaker: str, target: TcpServer) -> None:
    gateway = await world.start(forward(target.port))
    client, upstream = await opened(world, target)
    (client if breaker == "client" else upstream).reset()
    assert await (upstream if breaker == "client" else client).was_reset()
    flag = "DOWNSTREAM_RESET" if breaker == "client" else "UPSTREAM_RESET"
    line = await gateway.line()
    assert (line["flags"], line["error"]) == (flag, "connection reset: Connection reset by peer")
    assert await gateway.metric("hbone_tunnels_closed_total", route=ISTIOD, flags=flag) == 1
    await world.nothing_is_left()


async def test_slow_readers_and_their_pipes(world: World, target: TcpServer) -> None:
    gateway = await world.start(forward(target.port), splice_pipes=5)
    client, upstream = await opened(world, target)
    upstream.pause()
    client.send_soon(MUCH)
    async with asyncio.timeout(PATIENCE_S):
        while not await gateway.metric("hbone_splice_pipes"):
            pass
    assert client.unsent > 0
    assert await gateway.metric("hbone_splice_pipes_limit") == 5
    upstream.resume()
    assert await upstream.read(len(MUCH)) == MUCH
    assert await gateway.metric("hbone_splice_pipes") == 0


async def test_a_reload_moves_the_bound_of_pipes(world: World) -> None:
    gateway = await world.start(forward(1), splice_pipes=5)
    await gateway.reloaded([forward(1)], splice_pipes=6)
    assert await gateway.metric("hbone_splice_pipes_limit") == 6


async def test_the_end_of_the_gateway_resets_it(world: World, target: TcpServer) -> None:
    gateway = await world.start(forward(target.port), drain_delay=0, drain_timeout=0)
    client, upstream = await opened(world, target)
    gateway.terminate()
    assert await client.was_reset()
    assert await upstream.was_reset()
    assert await gateway.exit_code() == 0
    [line] = await gateway.lines()
    assert line["flags"] == "STOPPED"


async def test_a_drain_waits_for_it(world: World, target: TcpServer) -> None:
    gateway = await world.start(forward(target.port), drain_delay=0, drain_timeout="20s")
    client, upstream = await opened(world, target)
    gateway.terminate()
    await gateway.records.match("draining: 1 connections")
    await upstream.send(MUCH[: 1 << 20])
    upstream.end()
    assert await client.rest() == MUCH[: 1 << 20]
    client.end()
    assert await gateway.exit_code() == 0
    [line] = await gateway.lines()
    assert line["flags"] == "-"


# While the upstream is dialled.


async def test_a_client_that_breaks_off_ends_the_dialling(world: World) -> None:
    with unanswering() as port:
        gateway = await world.start(forward(port))
        client = await world.client(hello(ISTIOD))
        async with asyncio.timeout(PATIENCE_S):
            while [row["dst.addr"] for row in await gateway.dump("/tunnels")] != [f"127.0.0.1:{port}"]:
                pass
        client.reset()
        line = await gateway.line()
        assert (line["severity"], line["flags"]) == ("INFO", "DOWNSTREAM_RESET")
        assert line["error"] == "the client broke off before its tunnel was open"
        assert await gateway.refused() == {"DOWNSTREAM_RESET": 1}
        await world.nothing_is_left()


async def test_a_client_that_ended_while_its_upstream_was_dialled(world: World, target: TcpServer) -> None:
    """Its end is no reason to stop: it waits for the answer."""
    await world.start(forward(target.port))
    said = hello(ISTIOD) + MUCH[: 1 << 19]
    client = await world.client(said)
    client.end()
    upstream = await target.accept()
    assert await upstream.read(len(said)) == said
    await upstream.send(b"answer")
    upstream.end()
    assert await client.rest() == b"answer"
    line = await world.gateway.line()
    assert (line["flags"], line["bytes_sent"]) == ("-", len(said))


async def test_the_end_of_the_gateway_while_an_upstream_is_dialled(world: World) -> None:
    with unanswering() as port:
        gateway = await world.start(forward(port), drain_delay=0, drain_timeout=0)
        client = await world.client(hello(ISTIOD))
        await gateway.until_open(1)
        gateway.terminate()
        assert await client.rest() == INTERNAL_ERROR
        assert await gateway.exit_code() == 0
        [line] = await gateway.lines()
        assert line["flags"] == "STOPPED"


@asynccontextmanager
async def few_descriptors(left: int) -> AsyncIterator[None]:
    """So many may still be opened."""
    for _ in range(100):  # what is being closed needs some turns of the loop
        await asyncio.sleep(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + left, hard))
    fillers = []
    try:
        with suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        for _ in range(left):
            os.close(fillers.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


TO_DIAL, TO_TAKE = "connect to 127.0.0.1:{port}", "no file descriptor for the tunnel"


@pytest.mark.parametrize(
    ("left", "flag", "what", "used"),
    [(0, "CONNECT", TO_DIAL, True), (1, "LIMIT", TO_TAKE, True), (1, "LIMIT", TO_TAKE, False)],
    ids=["to dial", "to take the client's socket", "to watch the first"],
)
async def test_no_descriptor_is_left(world: World, left: int, flag: str, what: str, used: bool) -> None:
    """The tunnel is refused and says why; the gateway goes on."""
    with socket.create_server(("127.0.0.1", 0)) as istiod:  # where connections wait and need no descriptor
        istiod.setblocking(False)
        loop = asyncio.get_running_loop()
        port = istiod.getsockname()[1]
        gateway = await world.start(forward(port))
        said = hello(ISTIOD)
        if used:
            await world.client(said)  # what is opened once is open by then
            await gateway.until_open(1)
        client = await gateway.client()
        await gateway.until_open(used + 1)
        async with few_descriptors(left):
            await client.send(said)
            assert await client.rest() == INTERNAL_ERROR
        line = await gateway.line()
        assert (line["flags"], line["error"]) == (flag, f"{what.format(port=port)}: Too many open files")
        assert await gateway.metric("hbone_limit_refusals_total", limit="descriptors") == (flag == "LIMIT")
        client = await world.client(said)
        for _ in range(used + left + 1):  # the first one's, the one in vain if it came so far, and this one's
            upstream, _ = await asyncio.wait_for(loop.sock_accept(istiod), PATIENCE_S)
            with upstream:
                upstream.sendall(b"answer")
        assert await client.read(6) == b"answer"


async def test_no_descriptor_is_left_for_a_pipe(world: World, target: TcpServer) -> None:
    """Then bytes are copied."""
    gateway = await world.start(forward(target.port))
    client, upstream = await opened(world, target)
    async with few_descriptors(1):
        client.send_soon(MUCH)
        assert await upstream.read(len(MUCH)) == MUCH
    client.end()
    upstream.end()
    assert (await gateway.line())["flags"] == "-"


async def test_a_thousand_short_ones_leave_no_descriptor_behind(world: World, target: TcpServer) -> None:
    gateway = await world.start(forward(target.port))
    said = hello(ISTIOD)
    before = 0
    for number in range(1000):
        client = await world.client(said)
        upstream = await target.accept()
        assert await upstream.read(len(said)) == said
        if number % 2:
            client.reset()
            assert await upstream.was_reset()
        else:
            upstream.end()
            client.end()
            assert await client.rest() == b""
        await gateway.line()
        await client.close()
        await upstream.close()
        before = before or len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) <= before
    await world.nothing_is_left()


# Istio's ALPN check.


def verdict(sni: str, offered: tuple[str, ...], **fields: Any) -> str:
    """What the check says of a client: the error's flag, or nothing."""
    table = RouteTable([Route("**", forward=Address("b", 1), **fields)])
    try:
        check_alpn(table.match(istio_sni.parse(sni)), offered)
    except AlpnError as error:
        return error.flag
    return ""


@pytest.mark.parametrize("offered", sorted(istio_sni.ISTIO_ALPN))
def test_one_of_istio_s_names_is_enough(offered: str) -> None:
    assert verdict(NAME, ("h2", offered)) == ""


@pytest.mark.parametrize("offered", [(), ("h2", "http/1.1"), ("Istio",), ("istio-http/2",)])
@pytest.mark.parametrize("sni", [NAME, "outbound|8080||hello.demo.svc.cluster.local", "inbound_.80_._.a.b"])
def test_none_of_them_is_not(sni: str, offered: tuple[str, ...]) -> None:
    assert verdict(sni, offered) == "ALPN"
    assert verdict(sni, offered, alpn="any") == ""


@pytest.mark.parametrize("offered", [(), ("h2",), ("istio",)])
def test_a_bare_name_is_not_checked(offered: tuple[str, ...]) -> None:
    assert verdict(ISTIOD, offered) == ""


async def test_a_client_without_istio_s_alpn_gets_an_alert_and_nothing_is_dialled(
    world: World, target: TcpServer
) -> None:
    gateway = await world.start(forward(target.port, GLOB))
    client = await world.client(hello(NAME, alpn=("h2", "http/1.1")))
    assert await client.rest() == NO_APPLICATION_PROTOCOL
    line = await gateway.line()
    assert (line["severity"], line["flags"], line["route"]) == ("WARNING", "ALPN", GLOB)
    assert line["error"] == (
        "the client offers none of Istio's ALPN names; the route's alpn: any would let it in"
    )
    assert await gateway.refused() == {"ALPN": 1}
    assert target.count == 0


async def test_a_route_that_lets_anybody_in(world: World, target: TcpServer) -> None:
    await world.start(forward(target.port, GLOB, alpn="any"))
    said = hello(NAME, alpn=("h2", "http/1.1"))
    await world.client(said)
    assert await (await target.accept()).read(len(said)) == said

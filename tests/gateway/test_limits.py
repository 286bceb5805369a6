"""Limits on connections and on open tunnels, as clients, the log and the metrics see them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from shared.net.relay import memory_budget, tunnel_clock
from tests.support.gateway_load import EchoService, say
from tests.support.gateway_world import GLOB, World, tunnel
from tests.support.hellos import INTERNAL_ERROR, hello
from tests.support.http2_peer import PeerStream
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer, turned_away

CANCEL = 8
MIB = 1 << 20

PER_SOURCE = "max_connections_per_source"
PER_ROUTE = "max_connections_per_route"


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deadlines of open tunnels are met to some hundredths of a second instead of to the second."""
    monkeypatch.setattr(tunnel_clock, "LEAST_INTERVAL_S", 0.02)
    yield


# Connections.


async def test_one_address_has_only_so_many(world: World) -> None:
    gateway = await world.start(max_connections_per_source=2)
    client, stream = await world.open()
    silent = await gateway.client()
    address = await turned_away(gateway.port)
    line = await gateway.line()
    assert (line["flags"], line["src.addr"]) == ("LIMIT", address)
    assert line["error"] == "2 connections from 127.0.0.1 are open, which is max_connections_per_source"
    assert await gateway.refused() == {"LIMIT": 1}
    assert await gateway.metric("hbone_limit_refusals_total", limit=PER_SOURCE) == 1
    assert await gateway.metric("hbone_source_connections_max") == 2
    assert await gateway.metric("hbone_source_connections_limit") == 2
    silent.reset()
    await gateway.until_open(1)
    await world.echoes(*await world.open())
    await world.echoes(client, stream)


async def test_look_ups_for_clients_have_the_file_s_bounds(world: World) -> None:
    gateway = await world.start(max_lookups=8, max_lookups_per_client=2)
    assert await gateway.metric("hbone_dns_lookups_limit", **{"for": "clients"}) == 8
    await gateway.reloaded([tunnel(world.service.port)], max_lookups=9)
    assert await gateway.metric("hbone_dns_lookups_limit", **{"for": "clients"}) == 9


async def test_every_end_of_a_connection_makes_room(world: World) -> None:
    """Refused before, at and after its hello, broken off on either side, ended in order."""
    gateway = await world.start(max_connections_per_source=1)
    for end in range(6):
        client = await gateway.client()
        if end == 0:
            client.reset()
        elif end == 1:
            await client.send(b"no TLS")
            await client.rest()
        elif end == 2:
            await client.send(hello("hello.example.com"))
            await client.rest()
        else:
            await client.send(hello())
            stream = await world.service.request()
            stream.respond(200)
            await stream.read(len(hello()))
            if end == 3:
                stream.reset(CANCEL)
                assert await client.was_reset()
            elif end == 4:
                client.reset()
                await stream.broken()
            else:
                client.end()
                stream.end()
                assert await client.rest() == b""
        await gateway.until_open(0)
        assert await gateway.metric("hbone_source_connections_max") == 0
        assert await gateway.metric("hbone_route_connections", route=GLOB) == 0
    assert "LIMIT" not in await gateway.refused()


async def test_a_route_has_only_so_many(world: World) -> None:
    other = tunnel(world.service.port, host="*.other.svc.cluster.local")
    gateway = await world.start(tunnel(world.service.port, max_connections=1), other)
    client, stream = await world.open()
    one_too_many = await world.client()
    assert await one_too_many.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert (line["flags"], line["route"]) == ("LIMIT", GLOB)
    assert line["error"] == f"1 connections on route {GLOB} are open, which is the route's max_connections"
    assert await gateway.metric("hbone_limit_refusals_total", limit=PER_ROUTE) == 1
    assert await gateway.metric("hbone_route_connections", route=GLOB) == 1
    assert await gateway.metric("hbone_route_connections_limit", route=GLOB) == 1
    await world.client(hello("hello.other.svc.cluster.local"))
    (await world.service.request()).respond(200)
    client.end()
    stream.end()
    await gateway.until_open(1)
    await world.echoes(*await world.open())


async def test_a_tunnel_that_is_being_opened_counts_on_its_route(world: World) -> None:
    gateway = await world.start(max_connections_per_route=1)
    opening = await world.client()
    stream = await world.service.request()
    assert await (await world.client()).rest() == INTERNAL_ERROR
    assert (await gateway.line())["error"].endswith("which is max_connections_per_route")
    stream.respond(403, end=True)
    await opening.rest()
    await world.open()


async def test_a_reload_changes_them(world: World) -> None:
    gateway = await world.start()
    client, stream = await world.open()
    await gateway.reloaded([tunnel(world.service.port)], max_connections_per_source=1)
    await turned_away(gateway.port)
    assert await gateway.metric("hbone_source_connections_limit") == 1
    await world.echoes(client, stream)


# Silence.


@pytest.mark.usefixtures("looks_often")
async def test_a_silent_tunnel_is_reset(world: World) -> None:
    """Not ended: for all we know somebody waits for an answer."""
    gateway = await world.start(idle_timeout="1s")
    client, stream = await world.open()
    silent, silent_stream = await world.open()
    for _ in range(8):
        await asyncio.sleep(0.2)
        await world.echoes(client, stream)
    assert await silent.was_reset()
    assert await silent_stream.broken() == CANCEL
    line = await gateway.line()
    assert (line["flags"], line["src.addr"]) == ("IDLE", silent.address)
    assert line["error"] == "no byte either way for 1 s, which is the idle timeout"
    assert await gateway.metric("hbone_tunnels_closed_total", route=GLOB, flags="IDLE") == 1
    await world.echoes(client, stream)
    assert await gateway.metric("hbone_connections_open") == 1


@pytest.mark.usefixtures("looks_often")
async def test_a_reload_counts_for_tunnels_that_are_silent_already(world: World) -> None:
    gateway = await world.start(idle_timeout=0)
    client, stream = await world.open()
    await gateway.reloaded([tunnel(world.service.port)], idle_timeout="1s")
    assert await stream.broken() == CANCEL
    assert await client.was_reset()
    assert (await gateway.line())["flags"] == "IDLE"


@pytest.mark.usefixtures("looks_often")
async def test_a_forward_that_is_silent(world: World, target: TcpServer) -> None:
    gateway = await world.start({"host": GLOB, "forward": f"127.0.0.1:{target.port}"}, idle_timeout="1s")
    client = await world.client()
    upstream = await target.accept()
    assert await upstream.read(len(hello()))
    assert await client.was_reset()
    assert await upstream.was_reset()
    assert (await gateway.line())["flags"] == "IDLE"


# Age.


@pytest.mark.usefixtures("looks_often")
async def test_an_old_tunnel_at_rest_ends_in_order(world: World) -> None:
    """What the client then says (close_notify) and its end still reach the service."""
    gateway = await world.start(max_tunnel_lifetime="1s")
    client, stream = await world.open()
    assert await client.rest() == b""
    await client.send(b"close_notify")
    client.end()
    assert await stream.rest() == b"close_notify"
    stream.end()
    line = await gateway.line()
    assert (line["flags"], line["bytes_sent"]) == ("LIFETIME", len(hello()) + len(b"close_notify"))
    assert line["severity"] == "INFO"
    assert line["duration"] < 1.1
    assert await gateway.metric("hbone_tunnels_closed_total", route=GLOB, flags="LIFETIME") == 1
    await world.nothing_is_left()


@pytest.mark.usefixtures("looks_often")
async def test_an_old_tunnel_that_is_never_at_rest_is_reset(world: World) -> None:
    gateway = await world.start(tunnel(world.service.port, max_tunnel_lifetime="1s"))
    client, stream = await world.open()
    client.pause()
    await stream.fill()  # what nobody reads waits in the gateway
    assert await stream.broken() == CANCEL
    line = await gateway.line()
    assert (line["flags"], line["severity"]) == ("LIFETIME_RESET", "ERROR")
    with pytest.raises(ConnectionResetError):
        client.resume()
        await client.rest()


# Memory.


async def stalled(world: World, count: int) -> list[tuple[TcpPeer, PeerStream]]:
    """Open tunnels whose clients do not read what the service sends."""
    tunnels = [await world.open() for _ in range(count)]
    for client, _ in tunnels:
        client.pause()
    return tunnels


async def test_memory_in_all_is_bounded(world: World) -> None:
    """Twelve clients that do not read what they are sent would hold a window each, twelve MiB."""
    most = 4 * MIB
    async with EchoService.listening() as service:
        gateway = await world.start(tunnel(service.port), max_buffered=f"{most}")
        bystander = await world.client()
        await bystander.read(len(hello()))
        clients = [await world.client() for _ in range(12)]
        for client in clients:
            await client.read(len(hello()))
            client.pause()
        for client in clients:
            client.send_soon(bytes(16 * MIB))
        held: list[float] = []
        quiet = 0
        async with asyncio.timeout(PATIENCE_S):
            while quiet < 30:
                held.append(await gateway.metric("hbone_buffered_bytes"))
                quiet = quiet + 1 if held[-1] and held[-1] == held[-quiet - 1] else 0
                await say(bystander, b"I read what I am sent")
                await asyncio.sleep(memory_budget.TENSE_S)
        assert max(held) > MIB
        assert 0 < held[-1] <= most * 1.1, "what stays is below the mark"
        count = await gateway.metric("hbone_tunnels_closed_total", route=GLOB, flags="OVERLOAD")
        assert 4 <= count < 12, "those that held most, and no more"
        lines = [await gateway.line() for _ in range(int(count))]
        assert {line["flags"] for line in lines} == {"OVERLOAD"}
        assert all("of max_buffered" in line["error"] for line in lines)
        assert await gateway.metric("hbone_buffered_bytes_limit") == most


async def test_above_the_mark_nobody_is_taken(world: World) -> None:
    gateway = await world.start(max_buffered=f"{100 * MIB}")
    tunnels = await stalled(world, 3)
    sent = [await stream.fill() for _, stream in tunnels]
    await asyncio.sleep(memory_budget.CALM_S * 1.5)
    held = await gateway.metric("hbone_buffered_bytes")
    assert held > MIB, "beside what the kernel's buffers take, which is its own affair"
    # Between the two marks: nobody is reset, and nobody taken.
    await gateway.reloaded([tunnel(world.service.port)], max_buffered=f"{int(held / 1.05)}")
    address = await turned_away(gateway.port)
    line = await gateway.line()
    assert (line["flags"], line["src.addr"]) == ("LIMIT", address)
    assert line["error"] == "open tunnels hold as many bytes as max_buffered allows"
    assert await gateway.metric("hbone_limit_refusals_total", limit="max_buffered") == 1
    for (client, _), count in zip(tunnels, sent, strict=True):
        client.resume()
        await client.read(count)
    async with asyncio.timeout(PATIENCE_S):
        while await gateway.metric("hbone_buffered_bytes"):
            pass
    await world.echoes(*await world.open())
    assert await gateway.metric("hbone_tunnels_open", route=GLOB) == 4, "nobody was reset"


async def test_windows_are_what_the_file_says(world: World) -> None:
    await world.start(stream_window=f"{100 << 10}", connection_window=f"{300 << 10}")
    _, stream = await world.open()
    seen: list[int] = []
    stream.peer.act(
        lambda h2: seen.extend([h2.remote_settings.initial_window_size, h2.outbound_flow_control_window])
    )
    assert seen == [100 << 10, 300 << 10]


# What else is told.


async def test_lines_of_the_log_that_nobody_takes_are_counted(world: World) -> None:
    gateway = await world.start()
    assert await gateway.metric("hbone_access_log_dropped_total") == 0

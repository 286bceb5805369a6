"""hgate as a whole: bad input beside a good tunnel, limits, reload, drain, and what its ports tell."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from gateway.app import Gateway
from shared.errors import ConfigError, UnavailableError, UsageError
from shared.net.address import Address
from shared.net.listen import bound_address, listen
from shared.ops.access_log import AccessLog
from tests.support.gateway_world import GLOB, World, tunnel
from tests.support.hellos import INTERNAL_ERROR, UNRECOGNIZED_NAME, Bad, bad_hellos, hello
from tests.support.running_gateway import write_config
from tests.support.tcp_peer import TcpPeer

SECRET = "opaque-token-that-nobody-may-see"


# Bad input, beside a tunnel that must not notice.


BAD = bad_hellos() | {
    "a name that is none of Istio's": Bad(
        hello("outbound_.x"), "BAD_SNI", UNRECOGNIZED_NAME, "not of the form"
    ),
    "a name that no route takes": Bad(hello("hello.a.run.app"), "NO_ROUTE", UNRECOGNIZED_NAME, "no route"),
}


@pytest.mark.parametrize("bad", [pytest.param(bad, id=name) for name, bad in BAD.items()])
async def test_bad_input_is_counted_and_logged_and_disturbs_nobody(world: World, bad: Bad) -> None:
    """In the original some of these ended the whole gateway."""
    gateway = await world.start()
    bystander, stream = await world.open()
    client = await world.client(bad.data)
    if bad.ends:
        client.end()
    await world.echoes(bystander, stream)
    assert await client.read(len(bad.answer)) == bad.answer
    await client.was_reset()
    line = await gateway.line()
    assert (line["flags"], line["src.addr"], line["severity"]) == (bad.flag, client.address, "WARNING")
    assert bad.reason in line["error"]
    assert await gateway.refused() == {bad.flag: 1}
    await world.echoes(bystander, stream)
    assert await gateway.metric("hbone_connections_open") == 1


async def test_a_slow_hello_disturbs_nobody(world: World) -> None:
    gateway = await world.start(hello_timeout="200ms")
    bystander, stream = await world.open()
    client = await world.client(hello()[:-1])
    assert await client.rest() == b""
    line = await gateway.line()
    assert (line["flags"], line["src.addr"]) == ("HELLO_TIMEOUT", client.address)
    assert line["error"].startswith("no whole ClientHello within 0.2 s, got ")
    assert await gateway.refused() == {"HELLO_TIMEOUT": 1}
    await world.echoes(bystander, stream)


async def test_a_probe_is_counted_and_not_logged(world: World) -> None:
    gateway = await world.start()
    bystander, stream = await world.open()
    (await gateway.client()).end()
    (await gateway.client()).reset()
    refused = await world.client(hello("hello.example.com"))
    assert await refused.rest() == UNRECOGNIZED_NAME
    assert (await gateway.line())["src.addr"] == refused.address, "the probes have no line"
    assert await gateway.refused() == {"EMPTY": 2, "NO_ROUTE": 1}
    await world.echoes(bystander, stream)


async def test_all_of_it_at_once(world: World) -> None:
    gateway = await world.start()
    bystander, stream = await world.open()
    every = [bad for bad in BAD.values() for _ in range(10)]
    clients = []
    for bad in every:
        client = await world.client(bad.data)
        if bad.ends:
            client.end()
        clients.append(client)
    await world.echoes(bystander, stream)
    for client in clients:
        await client.was_reset()
    lines = [await gateway.line() for _ in every]
    assert {line["src.addr"] for line in lines} == {client.address for client in clients}
    assert sum((await gateway.refused()).values()) == len(every)
    await world.echoes(bystander, stream)
    assert await gateway.metric("hbone_connections_open") == 1


# Limits.


async def test_there_are_only_so_many_connections(world: World) -> None:
    gateway = await world.start(max_connections=2)
    client, stream = await world.open()
    silent = await gateway.client()
    one_too_many = await gateway.client()
    await one_too_many.was_reset()
    line = await gateway.line()
    assert (line["flags"], line["src.addr"]) == ("LIMIT", one_too_many.address)
    assert line["error"] == "2 connections are open, which is max_connections"
    assert await gateway.metric("hbone_connections_open") == 2
    assert await gateway.metric("hbone_connections_limit") == 2
    assert await gateway.refused() == {"LIMIT": 1}
    silent.reset()
    await gateway.until_open(1)
    await world.echoes(*await world.open())
    await world.echoes(client, stream)


async def test_a_crowd_does_not_get_past_the_limit(world: World) -> None:
    gateway = await world.start(max_connections=10)
    clients = await asyncio.gather(*(gateway.client() for _ in range(50)))
    lines = [await gateway.line() for _ in range(40)]
    assert {line["flags"] for line in lines} == {"LIMIT"}
    assert await gateway.metric("hbone_connections_open") == 10
    assert len(clients) == 50


# Reload.


async def test_a_reload_counts_for_new_connections(world: World) -> None:
    gateway = await world.start()
    client, stream = await world.open()
    write_config(gateway.file, [tunnel(world.service.port, host="*.other.svc.cluster.local")])
    gateway.reload()
    await gateway.records.match("^reload: 1 routes from ")
    assert await (await world.client()).rest() == UNRECOGNIZED_NAME
    await world.client(hello("hello.other.svc.cluster.local"))
    (await world.service.request()).respond(200)
    await world.echoes(client, stream)
    assert {shown["route"] for shown in await gateway.dump("/tunnels")} == {GLOB, "*.other.svc.cluster.local"}
    assert [route["host"] for route in (await gateway.dump("/config"))["routes"]] == [
        "*.other.svc.cluster.local"
    ]
    client.end()
    stream.end()
    lines = [await gateway.line() for _ in "12"]
    assert [line.get("route") for line in lines] == [None, GLOB]
    assert not any("ports and limits" in message for message in gateway.records.messages)


async def test_a_reload_of_a_broken_file_changes_nothing(world: World) -> None:
    gateway = await world.start()
    client, stream = await world.open()
    gateway.file.write_text('routes:\n  - host: "*.other"\n    tunel: "https://x.a.run.app/_hbone/15003"\n')
    gateway.reload()
    await gateway.records.match(
        rf"^reload: {gateway.file}:3: routes\[0\]\.tunel: .+; the running configuration stays$"
    )
    await world.echoes(client, stream)
    await world.echoes(*await world.open())
    gateway.file.unlink()
    gateway.reload()
    await gateway.records.match("^reload: .+ cannot be read: .+; the running configuration stays$")
    await world.echoes(*await world.open())


async def test_a_reload_says_what_it_cannot_change(world: World) -> None:
    gateway = await world.start()
    write_config(gateway.file, [tunnel(world.service.port)], max_connections=1)
    gateway.reload()
    await gateway.records.match("^reload: ports and limits change at the next start only$")
    tunnels = [await world.open() for _ in range(2)]
    for client, stream in tunnels:
        await world.echoes(client, stream)
    assert await gateway.metric("hbone_connections_limit") == 10_000
    assert (await gateway.dump("/config"))["limits"]["max_connections"] == 10_000


# Drain.


async def test_a_drain_lets_tunnels_finish(world: World) -> None:
    gateway = await world.start()
    assert (await gateway.get("health", "/healthz/ready")).status == 200
    client, stream = await world.open()
    opening = await world.client()
    last = await world.service.request()
    gateway.terminate()
    await gateway.records.match("^draining: 2 connections have up to 25 s$")
    ready = await gateway.get("health", "/healthz/ready")
    assert (ready.status, ready.body) == (503, b"draining\n")
    assert (await gateway.get("health", "/healthz/live")).status == 200
    with pytest.raises(ConnectionRefusedError):
        await TcpPeer.connect(gateway.port)
    last.respond(200)
    await last.read(len(hello()))
    await world.echoes(opening, last)
    opening.end()
    last.end()
    await world.echoes(client, stream)
    client.end()
    stream.end()
    assert await gateway.exit_code() == 0
    assert [line["flags"] for line in await gateway.lines()] == ["-", "-"]


async def test_a_drain_of_nothing_ends_at_once(world: World) -> None:
    gateway = await world.start()
    gateway.terminate()
    assert await gateway.exit_code() == 0
    assert await gateway.lines() == []


async def test_a_drain_waits_for_the_last_bytes(world: World) -> None:
    """The tunnel is over, but what its client has not read yet is still with the gateway."""
    gateway = await world.start()
    client, stream = await world.open()
    client.pause()
    client.end()
    assert await stream.rest() == b""
    gateway.terminate()
    await gateway.records.match("^draining: ")
    sent = await stream.fill()
    stream.end()
    await stream.peer.answered()
    client.resume()
    assert len(await client.rest()) == sent
    assert await gateway.exit_code() == 0


async def test_the_end_of_a_drain_resets_what_is_left(world: World) -> None:
    gateway = await world.start(drain_timeout="100ms")
    client, stream = await world.open()
    opening = await world.client()
    await world.service.request()
    silent = await gateway.client(hello()[:20])
    await gateway.until_open(3)
    gateway.terminate()
    assert await gateway.exit_code() == 0
    await gateway.records.match("^drain timeout: 3 connections are reset$")
    assert await client.was_reset()
    assert await stream.broken()
    assert await opening.rest() == INTERNAL_ERROR
    await silent.was_reset()
    lines = {line["src.addr"]: line for line in await gateway.lines()}
    assert {peer.address: lines[peer.address]["flags"] for peer in (client, opening, silent)} == {
        client.address: "STOPPED",
        opening.address: "STOPPED",
        silent.address: "STOPPED",
    }
    assert lines[client.address]["bytes_sent"] == len(hello())
    assert all(line["error"] == "the gateway stops" for line in lines.values())


# Start.


def gateway_of(file: Path, environ: Mapping[str, str] | None = None) -> Gateway:
    with open(os.devnull, "wb") as nowhere:
        return Gateway(file, environ or {}, AccessLog(nowhere, "json", "hgate"))


@pytest.mark.parametrize("purpose", ["listen", "admin", "metrics", "health"])
async def test_a_port_in_use(tmp_path: Path, purpose: str) -> None:
    taken = await listen(Address("127.0.0.1", 0), asyncio.Protocol, purpose="test")
    address = bound_address(taken)
    file = tmp_path / "hgate.yaml"
    write_config(file, [])
    text = file.read_text()
    old = '"127.0.0.1:0"' if purpose == "listen" else f'"{purpose}": "127.0.0.1:0"'
    file.write_text(text.replace(old, old.replace("127.0.0.1:0", str(address)), 1))
    with pytest.raises(UnavailableError) as caught:
        await gateway_of(file).run()
    assert str(caught.value) == f"{purpose}: cannot listen on {address}: the port is in use"
    taken.close()


async def test_a_file_with_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "hgate.yaml"
    file.write_text("routes: 5\n")
    with pytest.raises(ConfigError, match=r"hgate\.yaml:1: routes: "):
        gateway_of(file)


async def test_a_metadata_host_that_is_none(tmp_path: Path) -> None:
    write_config(tmp_path / "hgate.yaml", [])
    with pytest.raises(UsageError, match=r"^invalid GCE_METADATA_HOST=http://metadata "):
        gateway_of(tmp_path / "hgate.yaml", {"GCE_METADATA_HOST": "http://metadata"})


# What the ports tell.


async def test_no_secret_shows_anywhere(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token").write_text(SECRET)
    gateway = await world.start(tunnel(world.service.port, token={"file": "token"}))
    client, stream = await world.open()
    assert SECRET.encode() in stream[b"authorization"]
    refused = await world.client()
    answer = await world.service.request()
    answer.respond(401, [(b"content-type", b"text/plain"), (b"location", b"/login")], end=False)
    await answer.send(b"bad token: Bearer " + SECRET.encode())
    answer.end()
    await refused.rest()
    shown = [str(await gateway.line())]
    for path in ("/config", "/tunnels", "/connections"):
        shown.append((await gateway.get("admin", path)).body.decode())
    shown.append((await gateway.get("metrics", "/metrics")).body.decode())
    shown += gateway.records.messages
    shown.append(caplog.text)
    assert [text for text in shown if SECRET in text] == []
    assert "token" in shown[1], "the file's name may be seen"
    await world.echoes(client, stream)


async def test_the_configuration_is_shown(world: World) -> None:
    gateway = await world.start(
        tunnel(world.service.port, token={"audience": "https://{service}.a.run.app"}),
        {"host": "istiod.istio-system.svc", "forward": "istiod.istio-system.svc:15012"},
    )
    shown = await gateway.dump("/config")
    assert shown["listen"] == ["127.0.0.1:0"]
    assert shown["limits"]["hello_timeout_s"] == 10
    first, second = shown["routes"]
    assert (first["host"], first["method"]) == (GLOB, "POST")
    assert first["token"] == {"audience": "https://{service}.a.run.app", "file": None}
    assert first["tunnel"]["host"] == "{service}.example"
    assert second["forward"] == "istiod.istio-system.svc:15012"


async def test_connections_come_and_go(world: World) -> None:
    gateway = await world.start()
    origin = "http://hello.example"
    _, stream = await world.open()
    assert await gateway.metric("hbone_upstream_connections", origin=origin) == 1
    stream.peer.drop()
    await gateway.line()
    assert await gateway.metric("hbone_upstream_connections", origin=origin) == 0
    assert await gateway.metric("hbone_upstream_connections_opened_total", origin=origin) == 1
    assert await gateway.dump("/connections") == []


async def test_what_only_kubernetes_asks(world: World) -> None:
    gateway = await world.start()
    assert (await gateway.get("health", "/healthz/live")).body == b"alive\n"
    assert (await gateway.get("metrics", "/stats/prometheus")).status == 200
    assert (await gateway.get("health", "/config")).status == 404, "the admin's pages are on its own port"

"""hgate as a whole: bad input beside a good tunnel, limits, reload, drain, and what its ports tell."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway import drain
from shared.address import Address
from shared.credentials.certificates.authority import Authority
from shared.listen import bound_address, listen
from shared.net.tls.certificate_folder import CERTIFICATES_FILE, PRIVATE_KEY_FILE
from shared.net.tls.contexts import server_context
from shared.tasks import spawn
from shared.trust.spiffe import SpiffeId
from tests.support.gateway_world import GLOB, World, tunnel
from tests.support.hellos import INTERNAL_ERROR, NAME, UNRECOGNIZED_NAME, Bad, bad_hellos, hello
from tests.support.http2_peer import Service
from tests.support.running_gateway import change_config, running, write_config
from tests.support.tcp_peer import TcpPeer, turned_away
from tests.support.world import free_port

SERVICE_ID = SpiffeId.of_workload("demo.example", "demo", "hello")

CANCEL = 8
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
    address = await turned_away(gateway.port)
    line = await gateway.line()
    assert (line["flags"], line["src.addr"]) == ("LIMIT", address)
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
    crowd = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(50)]
    lines = [await gateway.line() for _ in range(40)]
    assert {line["flags"] for line in lines} == {"LIMIT"}
    assert await gateway.metric("hbone_connections_open") == 10
    for client in crowd:
        client.close()


# Reload.


def free_address() -> Address:
    return Address("127.0.0.1", free_port())


async def test_a_reload_counts_for_new_connections(world: World) -> None:
    gateway = await world.start()
    client, stream = await world.open()
    await gateway.reloaded([tunnel(world.service.port, host="*.other.svc.cluster.local")])
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
    config = json.loads(gateway.file.read_text())
    change_config(gateway.file, metrics="off")
    gateway.reload()
    await gateway.records.match(r"^reload: a change of metrics takes effect at the next start$")
    await gateway.records.match("^reload: 1 routes from ")
    assert (await gateway.dump("/config"))["metrics"] == config["metrics"]


async def test_a_reload_changes_how_long_tunnels_wait(world: World) -> None:
    gateway = await world.start(response_timeout="1h", connect_timeout="1h")
    client, stream = await world.open()
    silent = await listen(Address("127.0.0.1", 0), asyncio.Protocol, purpose="test")
    routes = [
        tunnel(bound_address(silent).port, host="silent", tunnel="https://silent.example/_hbone/1"),
        tunnel(world.service.port),
    ]
    await gateway.reloaded(routes, response_timeout="200ms", connect_timeout="100ms")
    await world.client()
    line = await gateway.line()
    assert (line["flags"], line["error"]) == ("UPSTREAM", "no response headers within 0.2 s")
    await world.client(hello("silent"))
    line = await gateway.line()
    assert (line["flags"], line["error"][-26:]) == ("CONNECT", ": not connected within 0.1 s"[-26:])
    await world.echoes(client, stream)
    silent.close()


async def test_a_reload_changes_the_limits_of_connections_to_services(world: World) -> None:
    gateway = await world.start(streams_per_connection=1, connections_per_origin=1, max_waiting=1)
    tunnels = [await world.open()]
    said = hello()
    waiting = await world.client(said)
    while await gateway.metric("hbone_upstream_waiting", origin="http://hello.example") < 1:
        pass
    await world.client()
    line = await gateway.line()
    assert (line["flags"], line["error"]) == (
        "UPSTREAM",
        f"http://hello.example at 127.0.0.1:{world.service.port}: 1 wait for a stream, which is max_waiting",
    )
    assert await gateway.metric("hbone_upstream_waiting_refused_total", origin="http://hello.example") == 1
    assert await gateway.metric("hbone_upstream_waiting_limit") == 1
    await gateway.reloaded([tunnel(world.service.port)], streams_per_connection=1, max_waiting=7)
    stream = await world.service.request()
    stream.respond(200)
    assert await stream.read(len(said)) == said
    await world.echoes(waiting, stream)
    tunnels.append(await world.open())
    for pair in tunnels:
        await world.echoes(*pair)
    assert len(world.service.connections) == 3
    assert await gateway.metric("hbone_upstream_waiting_limit") == 7


async def test_the_gateway_ends_after_its_connections_to_services(world: World) -> None:
    """Else their last bytes could end with the process."""
    gateway = await world.start()
    client, stream = await world.open()
    client.end()
    stream.end()
    await gateway.line()
    gateway.interrupt()
    assert await gateway.exit_code() == 0
    assert stream.peer.goaway
    assert stream.peer.lost


async def test_a_reload_changes_limits(world: World) -> None:
    gateway = await world.start()
    client, stream = await world.open()
    await gateway.reloaded([tunnel(world.service.port)], max_connections=1, hello_timeout="1ms")
    await turned_away(gateway.port)
    assert (await gateway.line())["flags"] == "LIMIT"
    assert await gateway.metric("hbone_connections_limit") == 1
    await world.echoes(client, stream)
    client.reset()
    await gateway.until_open(0)
    assert (await gateway.line())["flags"] == "DOWNSTREAM_RESET"
    assert await (await gateway.client()).rest() == b""
    assert (await gateway.line())["flags"] == "HELLO_TIMEOUT"
    assert (await gateway.dump("/config"))["limits"]["max_connections"] == 1


async def test_a_reload_changes_where_it_listens(world: World) -> None:
    gateway = await world.start()
    client, stream = await world.open()
    old = gateway.port
    new = free_address()
    change_config(gateway.file, listen=[str(new)])
    gateway.reload()
    await gateway.records.match(f"^no longer listening on 127.0.0.1:{old}$")
    with pytest.raises(ConnectionRefusedError):
        await TcpPeer.connect(old)
    gateway.port = new.port
    await world.echoes(*await world.open())
    await world.echoes(client, stream)


async def test_a_reload_whose_port_is_in_use_changes_nothing(world: World) -> None:
    gateway = await world.start()
    taken = await listen(Address("127.0.0.1", 0), asyncio.Protocol, purpose="test")
    listening = ["127.0.0.1:0", str(free_address()), str(bound_address(taken))]
    change_config(gateway.file, listen=listening, routes=[])
    gateway.reload()
    await gateway.records.match(
        f"^reload: listen: cannot listen on {bound_address(taken)}: the port is in use; the running"
    )
    assert (await gateway.dump("/config"))["listen"] == ["127.0.0.1:0"]
    await world.echoes(*await world.open())
    assert await gateway.metric("hbone_config_reloads_total", result="failure") == 1
    assert await gateway.metric("hbone_config_last_reload_successful") == 0
    taken.close()


async def test_a_renewed_ca_counts_for_new_connections(tmp_path: Path) -> None:
    """The file's name is the same, so nothing else tells the two apart."""
    authorities = [Authority.create(name) for name in ("old.example", "new.example")]
    services = []
    async with AsyncExitStack() as block:
        for authority, folder in zip(authorities, ("old", "new"), strict=True):
            authority.write(tmp_path / folder, authority.issue(SERVICE_ID, dns_names=("hello.example",)))
            files = (tmp_path / folder / name for name in (CERTIFICATES_FILE, PRIVATE_KEY_FILE))
            services.append(await block.enter_async_context(Service.listening(server_context(*files))))
        (tmp_path / "ca.pem").write_bytes(authorities[0].root_pem)
        fields = {"tunnel": "https://{service}.example/_hbone/15003", "ca": "ca.pem"}
        routes = [tunnel(services[0].port, **fields)]
        gateway = await block.enter_async_context(running(tmp_path / "hgate.yaml", routes))

        async def opened(service: Service) -> None:
            client = await gateway.client(hello())
            (await service.request()).respond(200)
            client.end()

        await opened(services[0])
        await gateway.reloaded([tunnel(services[1].port, **fields)])
        refused = await gateway.client(hello())
        assert await refused.rest() == INTERNAL_ERROR, "the new service, the old CA"
        (tmp_path / "ca.pem").write_bytes(authorities[1].root_pem)
        gateway.reload()
        await gateway.records.count("^reload: 1 routes from ", 2)
        await opened(services[1])


# Drain.


async def test_a_drain_lets_tunnels_finish(world: World) -> None:
    gateway = await world.start(drain_delay=0)
    assert (await gateway.get("health", "/healthz/ready")).status == 200
    assert await gateway.metric("hbone_ready") == 1
    client, stream = await world.open()
    opening = await world.client()
    last = await world.service.request()
    gateway.terminate()
    await gateway.records.match("^draining: 2 connections have up to 20 s$")
    ready = await gateway.get("health", "/healthz/ready")
    assert (ready.status, ready.body) == (503, b"draining\n")
    assert (await gateway.get("health", "/healthz/live")).status == 200
    assert await gateway.metric("hbone_ready") == 0
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


async def test_the_end_of_a_drain_resets_what_is_left(world: World) -> None:
    gateway = await world.start(drain_timeout="100ms")
    client, stream = await world.open()
    opening = await world.client()
    awaited = await world.service.request()
    silent = await gateway.client(hello()[:20])
    await gateway.until_open(3)
    gateway.terminate()
    assert await gateway.exit_code() == 0
    await gateway.records.match("^drain timeout: 3 connections are reset$")
    assert await client.was_reset()
    assert await stream.broken()
    assert await opening.rest() == INTERNAL_ERROR
    assert await awaited.broken() == CANCEL
    await silent.was_reset()
    lines = {line["src.addr"]: line for line in await gateway.lines()}
    assert {peer.address: lines[peer.address]["flags"] for peer in (client, opening, silent)} == {
        client.address: "STOPPED",
        opening.address: "STOPPED",
        silent.address: "STOPPED",
    }
    assert lines[client.address]["bytes_sent"] == len(hello())
    assert all(line["error"] == "the gateway stops" for line in lines.values())


async def test_a_drain_gives_time_to_notice(world: World) -> None:
    gateway = await world.start(drain_delay="400ms")
    client, stream = await world.open()
    assert (await gateway.get("health", "/healthz/ready")).status == 200
    gateway.terminate()
    await gateway.records.match(r"^not ready any more; connections are accepted for another 0\.4 s$")
    ready = await gateway.get("health", "/healthz/ready")
    assert (ready.status, ready.body) == (503, b"draining\n")
    late, last = await world.open()
    await gateway.records.match("^draining: 2 connections have up to 20 s$")
    with pytest.raises(ConnectionRefusedError):
        await TcpPeer.connect(gateway.port)
    await world.echoes(late, last)
    for peer, its_stream in ((client, stream), (late, last)):
        peer.end()
        its_stream.end()
    assert await gateway.exit_code() == 0
    assert [line["flags"] for line in await gateway.lines()] == ["-", "-"]


async def test_who_asks_for_readiness_has_time_to_notice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "NOTICE_S", 0.01)
    gateway = await world.start()
    assert (await gateway.get("health", "/healthz/ready")).status == 200
    gateway.terminate()
    await gateway.records.match(r"^not ready any more; connections are accepted for another 0\.01 s$")
    assert await gateway.exit_code() == 0


async def test_a_person_does_not_wait(world: World) -> None:
    gateway = await world.start(drain_delay="1h")
    assert (await gateway.get("health", "/healthz/ready")).status == 200
    gateway.interrupt()
    assert await gateway.exit_code() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("delay", ["0", "1h"], ids=["while tunnels finish", "while others notice"])
async def test_a_second_signal_ends_it_at_once(world: World, number: int, delay: str) -> None:
    gateway = await world.start(drain_delay=delay, drain_timeout="1h")
    client, stream = await world.open()
    gateway.terminate()
    await gateway.records.match("^not ready any more" if delay != "0" else "^draining: ")
    task = spawn(gateway.exit_code(), name="its end")
    while not task.done():
        os.kill(os.getpid(), number)
        await asyncio.wait({task}, timeout=0.05)
    assert task.result() == 128 + number
    assert await client.was_reset()
    assert await stream.broken()
    assert [line["flags"] for line in await gateway.lines()] == ["STOPPED"]


async def test_a_signal_that_comes_twice_is_one(world: World) -> None:
    """As `timeout` and terminals send it."""
    gateway = await world.start(drain_timeout="1h")
    client, stream = await world.open()
    for _ in range(3):
        gateway.terminate()
    await gateway.records.match("^draining: ")
    await world.echoes(client, stream)
    client.end()
    stream.end()
    assert await gateway.exit_code() == 0


async def test_sighup_in_a_drain_changes_nothing(world: World) -> None:
    gateway = await world.start()
    client, stream = await world.open()
    gateway.terminate()
    await gateway.records.match("^draining: ")
    write_config(gateway.file, [])
    gateway.reload()
    await world.echoes(client, stream)
    with pytest.raises(ConnectionRefusedError):
        await TcpPeer.connect(gateway.port)
    client.end()
    stream.end()
    assert await gateway.exit_code() == 0
    assert not any("reload" in message for message in gateway.records.messages)


async def test_who_waits_to_be_accepted_is_served(world: World) -> None:
    """In the kernel's queue when SIGTERM comes."""
    gateway = await world.start()
    said = hello()
    gateway.terminate()
    clients = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(20)]
    for client in clients:
        client.sendall(said)
    streams = [await world.service.request() for _ in clients]
    for stream in streams:
        stream.respond(200)
        assert await stream.read(len(said)) == said
        stream.end()
    for client in clients:
        client.close()
    assert await gateway.exit_code() == 0
    assert {line["sni"] for line in await gateway.lines()} == {NAME}


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

"""Connections that do not become tunnels: why, what the client is told, and that no token goes astray."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.credentials.certificates.authority import Authority
from shared.net.tls.contexts import server_context
from tests.support.gateway_world import GLOB, World, tunnel
from tests.support.hellos import INTERNAL_ERROR, NAME, UNRECOGNIZED_NAME, hello
from tests.support.http2_peer import Service
from tests.support.metadata_server import closed_port
from tests.support.running_gateway import change_config
from tests.support.tcp_peer import PATIENCE_S, TcpServer

BIG = bytes(range(256)) * 4096
"""1 MiB: a stream's whole window."""


async def test_a_reverse_route_before_its_port_is_open(world: World) -> None:
    """As after a reload that has brought both."""
    gateway = await world.start({"host": "other", "forward": "127.0.0.1:1"})
    routes = [{"host": GLOB, "reverse": True}]
    change_config(gateway.file, routes=routes, reverse={"certificates": "certs", "rules": []})
    gateway.reload()
    await gateway.records.match("^reload: 1 routes")
    assert await (await world.client()).rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert line["flags"] == "CONNECT"
    assert line["error"].endswith("the port for it opens at the next start")


async def test_nobody_listens(world: World) -> None:
    port = closed_port()
    gateway = await world.start(tunnel(port))
    client = await world.client()
    assert await client.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert line["flags"] == "CONNECT"
    assert line["error"] == f"connect to http://hello.example at 127.0.0.1:{port}: connection refused"
    assert line["dst.addr"] == f"127.0.0.1:{port}"
    await world.nothing_is_left()


async def test_a_service_that_does_not_speak_http2(world: World, target: TcpServer) -> None:
    gateway = await world.start(tunnel(target.port), response_timeout="100ms")
    client = await world.client()
    assert await client.rest() == INTERNAL_ERROR
    assert (await gateway.line())["flags"] == "UPSTREAM"


# Who may be asked for at all.


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("outbound_.x", "BAD_SNI"),  # a crash in the original
        ("outbound_.8080_._.", "BAD_SNI"),
        ("outbound_.99999_._.hello.demo.svc.cluster.local", "BAD_SNI"),
        ("outbound_.8080_._.hello.other.svc.cluster.local", "NO_ROUTE"),
        ("hello.example.com", "NO_ROUTE"),  # the original minted a token for hello.a.run.app
        ("localhost", "NO_ROUTE"),
    ],
)
async def test_a_name_that_no_route_takes_gets_no_token(world: World, name: str, flag: str) -> None:
    gateway = await world.start(tunnel(world.service.port, token={"audience": "https://{service}.a.run.app"}))
    client = await world.client(hello(name))
    assert await client.rest() == UNRECOGNIZED_NAME
    line = await gateway.line()
    assert (line["flags"], line["sni"]) == (flag, name.removesuffix("."))
    assert await gateway.refused() == {flag: 1}
    assert not {"route", "origin", "dst.addr"} & line.keys()
    assert (world.metadata.requests, world.service.connections) == ([], [])


async def test_the_hello_decides_only_what_the_route_leaves_open(world: World) -> None:
    await world.start(tunnel(world.service.port, tunnel="http://{subset}.example/_hbone/15003"))
    assert await (await world.client()).rest() == UNRECOGNIZED_NAME  # it has no subset
    line = await world.gateway.line()
    assert line["flags"] == "NO_ROUTE"
    assert "the name has no subset" in line["error"]


# Outer TLS.


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("demo.local")


@asynccontextmanager
async def secured(
    authority: Authority, folder: Path, name: str, offer: str = "h2"
) -> AsyncIterator[tuple[Service, str]]:
    """A service with a certificate for `name`, and the file with what to trust."""
    pair = authority.issue(dns_names=[name])
    (folder / "certificate.pem").write_bytes(pair.certificate_pem)
    (folder / "key.pem").write_bytes(pair.key_pem)
    (folder / "ca.pem").write_bytes(authority.root_pem)
    context = server_context(folder / "certificate.pem", folder / "key.pem")
    context.set_alpn_protocols([offer])
    async with Service.listening(tls=context) as service:
        yield service, "ca.pem"


def https(service: Service, ca: str) -> dict[str, Any]:
    return tunnel(service.port, tunnel="https://{service}.example/_hbone/15003", ca=ca)


async def test_a_tunnel_over_tls(world: World, authority: Authority, tmp_path: Path) -> None:
    async with secured(authority, tmp_path, "hello.example") as (service, ca):
        world.service = service
        await world.start(https(service, ca))
        client, stream = await world.open()
        client.send_soon(BIG)
        assert await stream.read(len(BIG)) == BIG
        await stream.send(BIG)
        assert await client.read(len(BIG)) == BIG
        assert stream[b":scheme"] == b"https"


@pytest.mark.parametrize(
    ("name", "offer", "trusted", "reason"),
    [
        ("other.example", "h2", True, "certificate refused: Hostname mismatch"),
        ("hello.example", "h2", False, "certificate refused: unable to get local issuer certificate"),
        ("hello.example", "http/1.1", True, "the server does not offer HTTP/2 (ALPN h2)"),
    ],
)
async def test_a_service_that_is_not_the_one(
    world: World, authority: Authority, tmp_path: Path, name: str, offer: str, trusted: bool, reason: str
) -> None:
    async with secured(authority, tmp_path, name, offer) as (service, ca):
        if not trusted:
            (tmp_path / ca).write_bytes(Authority.create("other.local").root_pem)
        gateway = await world.start(https(service, ca) | {"token": {"audience": "x"}})
        client = await world.client()
        assert await client.rest() == INTERNAL_ERROR
        line = await gateway.line()
        assert line["flags"] == "CONNECT"
        assert reason in line["error"]
        assert not service.asked, "the token was not shown to it"


async def test_a_service_that_keeps_silent_in_tls(world: World, tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "ca.pem").write_bytes(authority.root_pem)
    async with TcpServer.listening() as silent:
        route = tunnel(silent.port, tunnel="https://{service}.example/_hbone/15003", ca="ca.pem")
        gateway = await world.start(route, connect_timeout="100ms")
        client = await world.client()
        assert await client.rest() == INTERNAL_ERROR
        line = await gateway.line()
        assert (line["flags"], line["error"].rpartition(": ")[2]) == ("CONNECT", "not connected within 0.1 s")


# What a TLS client makes of it.


@pytest.mark.parametrize(
    ("name", "status", "error"),
    [
        (NAME, 403, "TLSV1_ALERT_ACCESS_DENIED"),
        (NAME, 404, "TLSV1_UNRECOGNIZED_NAME"),
        (NAME, 503, "TLSV1_ALERT_INTERNAL_ERROR"),
        ("hello.example.com", 0, "TLSV1_UNRECOGNIZED_NAME"),
    ],
)
async def test_openssl_understands_the_alert(world: World, name: str, status: int, error: str) -> None:
    gateway = await world.start(max_retries=0)
    context = ssl.create_default_context()

    async def shake_hands() -> None:
        with pytest.raises(ssl.SSLError) as caught:
            await asyncio.open_connection("127.0.0.1", gateway.port, ssl=context, server_hostname=name)
        assert caught.value.reason == error

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as both:
        both.create_task(shake_hands())
        if status:
            (await world.service.request()).respond(status, end=True)

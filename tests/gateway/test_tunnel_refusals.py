"""Connections that do not become tunnels: why, what the client is told, and that no token goes astray."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.routes import Token
from gateway.tunnel import MAX_TOKEN_SOURCES, TokenSources
from shared.errors import UsageError
from shared.identity.authority import Authority
from shared.identity.tokens import FileToken, MetadataToken, NoToken
from shared.net.tls import server_context
from tests.support.gateway_world import GLOB, World, tunnel
from tests.support.hellos import ACCESS_DENIED, INTERNAL_ERROR, NAME, UNRECOGNIZED_NAME, hello
from tests.support.http2_peer import Service
from tests.support.metadata_server import Answer, closed_port, unsigned_token
from tests.support.tcp_peer import PATIENCE_S, TcpServer

CANCEL = 8
REFUSED_STREAM = 7
BIG = bytes(range(256)) * 4096
"""1 MiB: a stream's whole window."""


# Refusals.

HTML = (b"content-type", b"text/html; charset=UTF-8")
PAGE = b"<html><title>403 Forbidden</title>secret page</html>" * 20


@pytest.mark.parametrize(
    ("status", "answer", "hint"),
    [
        (204, INTERNAL_ERROR, "answered 204"),
        (301, INTERNAL_ERROR, "answered 301 to https://accounts.example/login"),
        (401, ACCESS_DENIED, "answered 401: the token is invalid, expired or for another audience"),
        (403, ACCESS_DENIED, "answered 403: no token, or the caller lacks roles/run.invoker"),
        (404, UNRECOGNIZED_NAME, "answered 404: no such service"),
        (405, INTERNAL_ERROR, "answered 405"),
        (429, INTERNAL_ERROR, "answered 429: no instance of the service is free"),
        (500, INTERNAL_ERROR, "answered 500"),
        (502, INTERNAL_ERROR, "answered 502: the container does not answer as HTTP/2"),
        (503, INTERNAL_ERROR, "answered 503: the container crashed"),
        (504, INTERNAL_ERROR, "answered 504: no answer within"),
    ],
)
async def test_any_other_status_refuses(world: World, status: int, answer: bytes, hint: str) -> None:
    """The original copied the page of a 403 into the client's TLS connection."""
    gateway = await world.start()
    client = await world.client()
    stream = await world.service.request()
    location = [(b"location", b"https://accounts.example/login")] if status == 301 else []
    if status == 204:
        stream.respond(status, end=True)
    else:
        stream.respond(status, [HTML, *location])
        await stream.send(PAGE)
        stream.end()
    assert await client.rest() == answer
    line = await gateway.line()
    assert (line["severity"], line["message"]) == ("WARNING", "connection refused")
    assert (line["status"], line["flags"]) == (status, "STATUS")
    assert line["error"].startswith(hint)
    assert "html" not in str(line)
    assert (line["src.addr"], line["sni"], line["route"]) == (client.address, NAME, GLOB)
    assert await gateway.refused() == {"STATUS": 1}
    assert await gateway.metric("hbone_tunnels_opened_total", route=GLOB) == 0
    await world.nothing_is_left()


async def test_a_refusals_reason_is_logged(world: World) -> None:
    gateway = await world.start()
    client = await world.client()
    stream = await world.service.request()
    stream.respond(503, [(b"content-type", b"text/plain")])
    await stream.send(b"connect to 127.0.0.1:15003: connection refused\n")
    stream.end()
    assert await client.rest() == INTERNAL_ERROR
    assert (await gateway.line())["error"] == "answered 503: connect to 127.0.0.1:15003: connection refused"


async def test_a_page_without_an_end_is_not_waited_for(world: World) -> None:
    gateway = await world.start()
    client = await world.client()
    stream = await world.service.request()
    stream.respond(403, [HTML])
    await stream.send(PAGE)
    assert await client.rest() == ACCESS_DENIED
    assert await stream.broken() == CANCEL
    assert (await gateway.line())["status"] == 403


async def test_no_answer_in_time(world: World) -> None:
    gateway = await world.start(response_timeout="100ms")
    client = await world.client()
    stream = await world.service.request()
    assert await client.rest() == INTERNAL_ERROR
    assert await stream.broken() == CANCEL
    line = await gateway.line()
    assert (line["flags"], line["error"]) == ("UPSTREAM", "no response headers within 0.1 s")
    await world.nothing_is_left()


async def test_a_reset_instead_of_an_answer(world: World) -> None:
    gateway = await world.start()
    client = await world.client()
    (await world.service.request()).reset(REFUSED_STREAM)
    assert await client.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert (line["flags"], line["error"]) == ("UPSTREAM_RESET", "stream reset by the peer: REFUSED_STREAM")
    await world.nothing_is_left()


async def test_a_lost_connection_instead_of_an_answer(world: World) -> None:
    gateway = await world.start()
    client = await world.client()
    (await world.service.request()).peer.drop()
    assert await client.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert line["flags"] == "UPSTREAM_RESET"
    assert line["error"].startswith(f"connection to 127.0.0.1:{world.service.port} lost: ")
    await world.nothing_is_left()


async def test_goaway_instead_of_an_answer(world: World) -> None:
    gateway = await world.start()
    client, stream = await world.open()
    late = await world.client()
    (await world.service.request()).peer.say_goaway(last_stream_id=stream.number)
    assert await late.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert (line["flags"], line["error"]) == ("UPSTREAM_RESET", "stream not taken, GOAWAY: NO_ERROR")
    await world.echoes(client, stream)
    next_client, next_stream = await world.open()
    await world.echoes(next_client, next_stream)
    assert len(world.service.connections) == 2


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


async def test_a_service_that_does_not_speak_http2(world: World) -> None:
    async with TcpServer.listening() as silent:
        gateway = await world.start(tunnel(silent.port), response_timeout="100ms")
        client = await world.client()
        assert await client.rest() == INTERNAL_ERROR
        assert (await gateway.line())["flags"] == "UPSTREAM"


async def test_several_are_refused_together(world: World) -> None:
    gateway = await world.start(tunnel(closed_port()))
    clients = [await world.client() for _ in range(10)]
    assert [await client.rest() for client in clients] == [INTERNAL_ERROR] * 10
    lines = [await gateway.line() for _ in clients]
    assert {line["src.addr"] for line in lines} == {client.address for client in clients}
    assert await gateway.refused() == {"CONNECT": 10}


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


# Tokens.


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(b"", 404), "it answered 404; has this machine or pod a service account?"),
        (Answer(b"oops", 500), "it answered 500"),
        (Answer(b"no token"), "its answer is no JWT"),
        (Answer(raw=b""), "no token from the metadata server"),
        (Answer(unsigned_token(exp=1).encode()), "expired"),
    ],
)
async def test_without_a_token_nothing_is_sent(world: World, answer: Answer, reason: str) -> None:
    """The original then tried without one."""
    gateway = await world.start(tunnel(world.service.port, token={"audience": "x"}))
    world.metadata.answer = lambda _: answer
    client = await world.client()
    assert await client.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert line["flags"] == "IDENTITY_ERROR"
    assert reason in line["error"]
    assert world.service.connections == []
    await world.nothing_is_left()


async def test_one_token_serves_all_tunnels(world: World) -> None:
    await world.start(tunnel(world.service.port, token={"audience": "x"}))
    for _ in range(10):
        await world.client()
    authorizations = {(await world.service.request())[b"authorization"] for _ in range(10)}
    assert (len(authorizations), len(world.metadata.requests)) == (1, 1)


async def test_a_401_makes_room_for_a_new_token(world: World) -> None:
    await world.start(tunnel(world.service.port, token={"audience": "x"}))
    clients = [await world.client() for _ in range(5)]
    streams = [await world.service.request() for _ in clients]
    old = {stream[b"authorization"] for stream in streams}
    for stream in streams:
        stream.respond(401, end=True)
    assert [await client.rest() for client in clients] == [ACCESS_DENIED] * 5
    await world.client()
    new = (await world.service.request())[b"authorization"]
    await world.client()
    assert (await world.service.request())[b"authorization"] == new
    assert len(old) == 1 and new not in old
    assert len(world.metadata.requests) == 2, "five refusals of one token cost one new token"


async def test_a_403_keeps_the_token(world: World) -> None:
    await world.start(tunnel(world.service.port, token={"audience": "x"}))
    client = await world.client()
    (await world.service.request()).respond(403, end=True)
    assert await client.rest() == ACCESS_DENIED
    await world.client()
    await world.service.request()
    assert len(world.metadata.requests) == 1


async def test_a_token_from_a_file(world: World, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("opaque-token\n")
    await world.start(tunnel(world.service.port, token={"file": "token"}))
    await world.client()
    assert (await world.service.request())[b"authorization"] == b"Bearer opaque-token"


async def test_the_sources_of_tokens() -> None:
    sources = TokenSources("127.0.0.1:1")
    audience = Token("audience", "https://a.example")
    assert isinstance(sources.of(Token("none")), NoToken)
    assert isinstance(sources.of(Token("file", "/nonexistent")), FileToken)
    assert isinstance(source := sources.of(audience), MetadataToken)
    assert sources.of(audience) is source
    for number in range(MAX_TOKEN_SOURCES):
        sources.of(Token("audience", f"https://{number}.example"))
    assert sources.of(audience) is not source, "the oldest is forgotten"


def test_a_metadata_host_that_is_none() -> None:
    with pytest.raises(UsageError, match="GCE_METADATA_HOST=http://metadata"):
        TokenSources("http://metadata")


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
    gateway = await world.start()
    context = ssl.create_default_context()

    async def shake_hands() -> None:
        with pytest.raises(ssl.SSLError) as caught:
            await asyncio.open_connection("127.0.0.1", gateway.port, ssl=context, server_hostname=name)
        assert caught.value.reason == error

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as both:
        both.create_task(shake_hands())
        if status:
            (await world.service.request()).respond(status, end=True)

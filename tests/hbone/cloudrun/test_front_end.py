"""The front end between a container and clients that the test plays with the h2 library, curl and nghttp."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path

import pytest
from h2.connection import H2Connection
from h2.settings import SettingCodes

from hbone.cloudrun.limits import FrontEndLimits
from shared.http2 import frames
from shared.http2.header_rules import list_bytes
from shared.trust.jwt_check import Issuer
from tests.hbone.cloudrun.world import HOST, URL, Credentials
from tests.support.http2_peer import LOST, Http2Peer, PeerStream, Service
from tests.support.metadata_server import closed_port
from tests.support.process import run
from tests.support.tcp_peer import TcpServer

MIB = 1 << 20

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl command")
needs_nghttp = pytest.mark.skipif(shutil.which("nghttp") is None, reason="no nghttp command")


async def answer_to(stream: PeerStream) -> tuple[int, str]:
    """Status and body of a whole answer, whether or not a reset came right after it."""
    text = (await stream.rest()).decode()
    return int(stream[b":status"]), text


Exchange = tuple[PeerStream, PeerStream]


@pytest.fixture
async def exchange(credentials: Credentials, service: Service, client: Http2Peer) -> Exchange:
    """A request that has reached the container: the client's end of it, and the container's."""
    asked = client.request(b"POST", b"/_hbone/22", [credentials.bearer()])
    return asked, await service.request()


# Tokens.


async def test_a_token_opens_the_service_and_loses_its_signature(
    credentials: Credentials, service: Service, client: Http2Peer
) -> None:
    token = credentials.token()
    asked = client.request(
        b"GET", b"/path?q=1", [(b"authorization", f"Bearer {token}".encode()), (b"x-own", b"1")], end=True
    )
    request = await service.request()
    signed = token.rpartition(".")[0]
    assert dict(request.fields) == {
        b":method": b"GET",
        b":scheme": b"https",
        b":authority": b"app",
        b":path": b"/path?q=1",
        b"authorization": f"Bearer {signed}.SIGNATURE_REMOVED_BY_GOOGLE".encode(),
        b"x-own": b"1",
        b"x-forwarded-for": b"127.0.0.1",
        b"x-forwarded-proto": b"https",
    }
    assert await request.rest() == b""
    request.respond(200, [(b"x-answer", b"2")])
    await request.send(b"hello")
    request.end()
    assert await asked.status() == 200
    assert asked[b"x-answer"] == b"2"
    assert asked[b"server"] == b"hbone cloudrun"
    assert await asked.rest() == b"hello"


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("none", 403, "the request carries no token"),
        ("empty", 403, "the request carries no token"),
        ("basic", 401, "not of the form `Bearer TOKEN`"),
        ("no JWT", 401, "no JWT"),
        ("other key", 401, "signed with a key that is not known here"),
        ("other signature", 401, "its signature is not valid"),
        ("expired", 401, "it expired "),
        ("other audience", 401, f"its audience is https://other.a.run.app, expected {URL}"),
    ],
)
async def test_tokens_that_open_nothing(
    credentials: Credentials, kind: str, status: int, reason: str, service: Service, client: Http2Peer
) -> None:
    signed = credentials.token().rpartition(".")[0]
    other_audience = credentials.token("https://other.a.run.app")
    value = {
        "none": None,
        "empty": "",
        "basic": "Basic dXNlcjpwYXNz",
        "no JWT": "Bearer secret",
        "other key": f"Bearer {Issuer().mint(URL)}" if kind == "other key" else None,
        "other signature": f"Bearer {signed}.{other_audience.rpartition('.')[2]}",
        "expired": f"Bearer {credentials.token(lifetime_s=-60)}",
        "other audience": f"Bearer {other_audience}",
    }[kind]
    fields = [] if value is None else [(b"authorization", value.encode())]
    asked = client.request(b"POST", b"/_hbone/22", fields)
    answered, text = await answer_to(asked)
    assert (answered, reason in text) == (status, True), text
    assert not service.asked


async def test_the_serverless_header_comes_first(
    credentials: Credentials, service: Service, client: Http2Peer
) -> None:
    _, bearer = credentials.bearer()
    own = b"Bearer the.app's.own"
    client.request(b"GET", b"/", [(b"authorization", own), (b"x-serverless-authorization", bearer)], end=True)
    request = await service.request()
    assert request[b"authorization"] == own
    assert request[b"x-serverless-authorization"].endswith(b".SIGNATURE_REMOVED_BY_GOOGLE")

    refused = client.request(
        b"GET", b"/", [(b"authorization", bearer), (b"x-serverless-authorization", own)], end=True
    )
    assert await refused.status() == 401
    assert not service.asked


async def test_an_open_service_leaves_tokens_to_the_app(credentials: Credentials) -> None:
    async with (
        Service.listening() as service,
        credentials.front_end(service.port, is_open=True) as port,
        credentials.client(port) as client,
    ):
        client.request(b"GET", b"/", end=True)
        assert b"authorization" not in dict((await service.request()).fields)
        client.request(b"GET", b"/", [(b"authorization", b"Bearer the.app's.own")], end=True)
        assert (await service.request())[b"authorization"] == b"Bearer the.app's.own"


# Bodies, both ways at once.


async def test_full_duplex_before_and_after_the_response(exchange: Exchange) -> None:
    asked, request = exchange
    await asked.send(b"before the response")
    assert await request.read(19) == b"before the response"
    request.respond(200)
    assert await asked.status() == 200, "with the headers alone"
    for number in range(3):
        await request.send(b"ping %d" % number)
        assert await asked.read(6) == b"ping %d" % number
        await asked.send(b"pong %d" % number)
        assert await request.read(6) == b"pong %d" % number
    asked.end()
    assert await request.rest() == b""
    await request.send(b"the client's end was not the end")
    request.end()
    assert await asked.rest() == b"the client's end was not the end"


async def test_the_container_may_end_first(exchange: Exchange) -> None:
    asked, request = exchange
    request.respond(200)
    request.end()
    assert await asked.rest() == b""
    await asked.send(b"still listening?")
    asked.end()
    assert await request.rest() == b"still listening?"


async def test_much_at_once_both_ways(exchange: Exchange) -> None:
    up, down = os.urandom(3 * MIB), os.urandom(3 * MIB + 1)
    asked, request = exchange
    request.respond(200)
    async with asyncio.TaskGroup() as group:
        group.create_task(asked.send(up)).add_done_callback(lambda _: asked.end())
        group.create_task(request.send(down)).add_done_callback(lambda _: request.end())
        received = group.create_task(request.rest())
        assert await asked.rest() == down
        assert await received == up


async def test_trailers_both_ways(credentials: Credentials, service: Service, client: Http2Peer) -> None:
    asked = client.request(b"POST", b"/Greeter/Hello", [credentials.bearer(), (b"te", b"trailers")])
    await asked.send(b"message")
    asked.end([(b"x-checksum", b"1")])
    request = await service.request()
    assert await request.rest() == b"message"
    assert request.trailers == [(b"x-checksum", b"1")]
    request.respond(200)
    await request.send(b"answer")
    request.end([(b"grpc-status", b"0")])
    assert await asked.rest() == b"answer"
    assert asked.trailers == [(b"grpc-status", b"0")]


async def test_trailers_come_after_what_waits_for_the_client(
    credentials: Credentials, service: Service, client: Http2Peer
) -> None:
    asked = client.request(b"GET", b"/", [credentials.bearer()], end=True)
    asked.window_held = True
    request = await service.request()
    request.respond(200)
    body = os.urandom(200 << 10)  # three times the client's window
    await request.send(body)
    request.end([(b"grpc-status", b"0")])
    await client.until(lambda: len(asked.data) > 60_000)
    assert asked.trailers is None
    asked.release_window()
    assert await asked.rest() == body
    assert asked.trailers == [(b"grpc-status", b"0")]


async def test_a_response_of_trailers_alone(
    credentials: Credentials, service: Service, client: Http2Peer
) -> None:
    asked = client.request(b"POST", b"/", [credentials.bearer()], end=True)
    (await service.request()).respond(200, [(b"grpc-status", b"12")], end=True)
    assert await asked.rest() == b""
    assert asked[b"grpc-status"] == b"12"


# Ends that are none.


async def test_the_client_resets(exchange: Exchange) -> None:
    asked, request = exchange
    asked.reset(frames.CANCEL)
    assert await request.broken() == frames.CANCEL


@pytest.mark.parametrize("limits", [FrontEndLimits(concurrency=1)])
async def test_a_client_that_resets_at_once(
    credentials: Credentials, service: Service, client: Http2Peer
) -> None:
    """The container is not bothered with what nobody waits for."""
    for _ in range(3):
        client.request(b"POST", b"/", [credentials.bearer()]).reset(frames.CANCEL)
    client.request(b"GET", b"/last", [credentials.bearer()], end=True)
    assert (await service.request())[b":path"] == b"/last", "and its place is free again"
    assert not service.asked


async def test_the_client_goes(client: Http2Peer, exchange: Exchange) -> None:
    _, request = exchange
    request.respond(200)
    await client.close()
    assert await request.broken() == frames.CANCEL


async def test_the_container_resets_in_mid_response(exchange: Exchange) -> None:
    asked, request = exchange
    request.respond(200)
    await request.send(b"half")
    assert await asked.read(4) == b"half"
    request.reset(frames.INTERNAL_ERROR)
    assert await asked.broken() > 0


async def test_the_container_answers_in_full_and_wants_no_more(exchange: Exchange) -> None:
    """RFC 9113 section 8.1: END_STREAM, then RST_STREAM with NO_ERROR."""
    asked, request = exchange
    request.respond(413)
    await request.send(b"too much for me")
    request.end()
    request.reset(frames.NO_ERROR)
    assert await asked.rest() == b"too much for me"
    assert await asked.status() == 413


# The container.


@pytest.mark.parametrize("end", ["reset", "drop"])
async def test_the_container_breaks_off_before_it_answers(
    credentials: Credentials, end: str, service: Service, client: Http2Peer, exchange: Exchange
) -> None:
    asked, request = exchange
    await asked.send(b"hello?")
    if end == "reset":
        request.reset(frames.INTERNAL_ERROR)
    else:
        request.peer.drop()
    status, text = await answer_to(asked)
    assert (status, "the container broke off: " in text) == (503, True), text
    again = client.request(b"GET", b"/", [credentials.bearer()], end=True)
    (await service.request()).respond(200, end=True)
    assert await again.status() == 200, "on the next connection, if it has to be"


async def test_a_container_of_http1(credentials: Credentials) -> None:
    """What `--use-http2` in front of an app without HTTP/2 gives."""
    async with (
        TcpServer.listening() as server,
        credentials.front_end(server.port) as port,
        credentials.client(port) as client,
    ):
        asked = client.request(b"POST", b"/", [credentials.bearer()])
        container = await server.accept()
        await container.read_until(b"\x01\x04\x00\x00\x00\x01")  # HEADERS, END_HEADERS, stream 1
        await container.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        status, _ = await answer_to(asked)
        assert status == 503


async def test_a_container_that_hangs_up_at_once(credentials: Credentials) -> None:
    """It is asked once, or perhaps twice, and then there is none."""
    connections = 0

    def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()
        if connections == 5:
            container.close()

    container = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with (
        container,
        credentials.front_end(container.sockets[0].getsockname()[1]) as port,
        credentials.client(port) as client,
    ):
        asked = client.request(b"POST", b"/", [credentials.bearer()])
        status, _ = await answer_to(asked)
        assert status == 503
        assert connections <= 2


# Limits.


def forget_the_limit(h2: H2Connection) -> None:
    """A client that does not care how many streams it may open."""
    h2.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 1000
    h2.remote_settings.acknowledge()


@pytest.mark.parametrize("limits", [FrontEndLimits(streams_per_connection=2)])
async def test_streams_per_connection(credentials: Credentials, service: Service, client: Http2Peer) -> None:
    first = client.request(b"POST", b"/1", [credentials.bearer()])
    request = await service.request()
    announced: list[int] = []
    client.act(lambda h2: announced.append(h2.remote_settings.max_concurrent_streams))
    assert announced == [2]
    client.act(forget_the_limit)
    client.request(b"POST", b"/2", [credentials.bearer()])
    third = client.request(b"POST", b"/3", [credentials.bearer()])
    assert await third.broken() == frames.REFUSED_STREAM
    assert (await service.request())[b":path"] == b"/2"

    first.end()
    request.respond(200, end=True)
    await first.rest()
    client.request(b"POST", b"/4", [credentials.bearer()])
    assert (await service.request())[b":path"] == b"/4"
    assert not service.asked


@pytest.mark.parametrize("limits", [FrontEndLimits(request_timeout_s=0.2, concurrency=1)])
async def test_no_answer_in_time(credentials: Credentials, service: Service, client: Http2Peer) -> None:
    for _ in range(2):  # the second has a place: the first gave it back
        asked = client.request(b"POST", b"/", [credentials.bearer()])
        await asked.send(b"hello?")
        request = await service.request()
        status, text = await answer_to(asked)
        assert (status, "request timeout of 0.2 s" in text) == (504, True), text
        assert await request.broken() == frames.CANCEL


@pytest.mark.parametrize("limits", [FrontEndLimits(request_timeout_s=0.3, concurrency=1)])
async def test_no_end_in_time(credentials: Credentials, service: Service, client: Http2Peer) -> None:
    for _ in range(2):
        asked = client.request(b"POST", b"/", [credentials.bearer()])
        request = await service.request()
        request.respond(200)
        await request.send(b"so far")
        assert await asked.read(6) == b"so far"
        assert await asked.broken() > 0, "no orderly end: the response is not whole"
        assert await request.broken() == frames.CANCEL


@pytest.mark.parametrize("limits", [FrontEndLimits(header_bytes=4096)])
async def test_headers_that_are_too_long(
    credentials: Credentials, service: Service, client: Http2Peer
) -> None:
    bearer = credentials.bearer()
    fixed = {b":method": b"GET", b":scheme": b"https", b":authority": b"app", b":path": b"/"}
    used = list_bytes([*fixed.items(), bearer, (b"x", b"")])
    client.request(b"GET", b"/", [bearer, (b"x", b"y" * (4096 - used))], end=True)
    (await service.request()).respond(200, end=True)
    asked = client.request(b"GET", b"/", [bearer, (b"x", b"y" * (4097 - used))], end=True)
    status, text = await answer_to(asked)
    assert (status, "headers of 4097 bytes, the limit is 4096" in text) == (431, True), text
    in_the_path = client.request(b"GET", b"/" + b"p" * 4096, [bearer], end=True)
    assert await in_the_path.status() == 431
    assert not service.asked


async def test_the_default_takes_what_cloud_run_takes(
    credentials: Credentials, service: Service, client: Http2Peer
) -> None:
    """Some 60 KiB, which is HEADERS and three CONTINUATIONs."""
    asked = client.request(b"GET", b"/", [credentials.bearer(), (b"x", b"y" * (58 << 10))], end=True)
    assert len((await service.request())[b"x"]) == 58 << 10
    too_long = client.request(b"GET", b"/", [credentials.bearer(), (b"x", b"y" * (60 << 10))], end=True)
    assert await too_long.status() == 431
    assert asked.reset_code is None


@pytest.mark.parametrize("limits", [FrontEndLimits(concurrency=2)])
async def test_concurrency(credentials: Credentials, service: Service, client: Http2Peer) -> None:
    asked = [client.request(b"POST", b"/%d" % n, [credentials.bearer()]) for n in range(5)]  # in one read
    requests = [await service.request() for _ in range(2)]
    for refused in asked[2:]:
        status, text = await answer_to(refused)
        assert (status, "no instance is free" in text) == (429, True), text
    assert not service.asked

    requests[0].respond(200, end=True)
    asked[0].end()
    await asked[0].rest()
    await requests[0].rest()
    client.request(b"POST", b"/more", [credentials.bearer()])
    assert (await service.request())[b":path"] == b"/more"


async def test_a_container_that_is_down_takes_no_place(credentials: Credentials) -> None:
    async with (
        credentials.front_end(closed_port(), FrontEndLimits(concurrency=1)) as port,
        credentials.client(port) as client,
    ):
        for _ in range(3):
            asked = client.request(b"POST", b"/", [credentials.bearer()])
            status, text = await answer_to(asked)
            assert (status, "the container is not there: connect to" in text) == (503, True), text


# The log.


async def test_a_request_leaves_one_line_without_its_token(
    credentials: Credentials, caplog: pytest.LogCaptureFixture, service: Service, client: Http2Peer
) -> None:
    caplog.set_level(logging.DEBUG, "hbone")
    token = credentials.token()
    asked = client.request(b"POST", b"/x", [(b"authorization", f"Bearer {token}".encode())])
    await asked.send(b"12345")
    asked.end()
    request = await service.request()
    await request.rest()
    request.respond(200)
    await request.send(b"123")
    request.end()
    await asked.rest()
    refused = client.request(b"POST", b"/y", [(b"authorization", f"Bearer {token}x".encode())])
    status, _ = await answer_to(refused)
    assert status == 401
    (line,) = [vars(record) for record in caplog.records if record.message == "request"]
    assert line["path"] == "/x"
    assert line["status"] == 200
    assert line["token_audience"] == URL
    assert line["caller"] == "gateway@local"
    assert (line["bytes_sent"], line["bytes_recv"]) == (5, 3)
    assert line["error"] is None
    (line,) = [vars(record) for record in caplog.records if record.message == "refused"]
    assert (line["path"], line["status"]) == ("/y", 401)
    assert token.rpartition(".")[2] not in str([vars(record) for record in caplog.records])


async def test_what_the_container_did_not_answer_is_logged_with_the_reason(
    exchange: Exchange, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hbone")
    asked, request = exchange
    request.reset(frames.INTERNAL_ERROR)
    status, _ = await answer_to(asked)
    assert status == 503
    (line,) = [vars(record) for record in caplog.records if record.message == "request"]
    assert line["error"] == "stream reset by the peer: INTERNAL_ERROR"


# The end.


async def test_close(credentials: Credentials) -> None:
    async with Service.listening() as service:
        async with credentials.front_end(service.port) as port:
            connecting = credentials.client(port)
            client = await connecting.__aenter__()
            asked = client.request(b"POST", b"/", [credentials.bearer()])
            request = await service.request()
        assert await asked.broken() in (LOST, frames.CONNECT_ERROR)
        assert await request.broken() in (LOST, frames.CANCEL)
        await client.until(lambda: client.lost)
        assert client.goaway
        await connecting.__aexit__(None, None, None)
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)


# Clients that others wrote.


async def echo(service: Service) -> PeerStream:
    """Answers one request with its body, and a trailer."""
    request = await service.request()
    body = await request.rest()
    is_head = request[b":method"] == b"HEAD"
    request.respond(200, [(b"content-length", str(len(body)).encode()), (b"x-method", request[b":method"])])
    if not is_head:
        await request.send(body)
    request.end([] if is_head else [(b"x-trailer", b"the end")])
    return request


@needs_curl
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
async def test_curl(credentials: Credentials, tmp_path: Path, method: str) -> None:
    body = os.urandom(MIB) if method == "POST" else b""
    (tmp_path / "body").write_bytes(body)
    flags = {"GET": [], "HEAD": ["--head"], "POST": ["--data-binary", f"@{tmp_path / 'body'}"]}[method]
    async with Service.listening() as service, credentials.front_end(service.port) as port:
        async with asyncio.TaskGroup() as group:
            request = group.create_task(echo(service))
            code, out, err = await run(
                *("curl", "--http2", "--silent", "--show-error", "--cacert", credentials.folder / "ca.pem"),
                *("--resolve", f"{HOST}:{port}:127.0.0.1", "--dump-header", tmp_path / "headers", *flags),
                *("--header", f"authorization: Bearer {credentials.token()}", f"https://{HOST}:{port}/path"),
            )
        assert (code, err) == (0, b"")
        assert (await request)[b":method"] == method.encode()
        headers = (tmp_path / "headers").read_text()
        assert headers.startswith("HTTP/2 200")
        assert f"x-method: {method}" in headers
        assert out == body or method == "HEAD"


@needs_curl
async def test_curl_without_a_token(credentials: Credentials) -> None:
    async with Service.listening() as service, credentials.front_end(service.port) as port:
        code, out, _ = await run(
            *("curl", "--http2", "--silent", "--cacert", credentials.folder / "ca.pem", "--write-out"),
            *(" %{http_code} %{http_version}", "--resolve", f"{HOST}:{port}:127.0.0.1"),
            f"https://{HOST}:{port}/",
        )
        assert (code, out) == (0, b"the request carries no token\n 403 2")


@needs_nghttp
@pytest.mark.shows_secret  # nghttp --verbose does
async def test_nghttp_with_trailers(credentials: Credentials, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(os.urandom(100_000))
    async with Service.listening() as service, credentials.front_end(service.port) as port:
        async with asyncio.TaskGroup() as group:
            request = group.create_task(echo(service))
            code, out, _ = await run(
                *("nghttp", "--verbose", "--no-verify-peer", "--data", tmp_path / "body"),
                *("--trailer", "x-sum: 1", "--header", f"authorization: Bearer {credentials.token()}"),
                f"https://127.0.0.1:{port}/path",
            )
        assert code == 0
        assert (await request).trailers == [(b"x-sum", b"1")]
        assert b":status: 200" in out
        assert b"x-trailer: the end" in out
        assert b"RST_STREAM" not in out

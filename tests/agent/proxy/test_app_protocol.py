"""What the app speaks: found out when the first request comes, whatever the app does with the question."""

from __future__ import annotations

import asyncio
import logging

import pytest

from agent.config.settings import Settings
from agent.proxy import app_protocol
from agent.proxy.app_protocol import AppProtocol
from shared.address import Address
from shared.errors import DialError
from shared.tasks import spawn
from tests.shared.http2.dialogue import PREFACE
from tests.support.http2_peer import Http2Peer, PeerStream, Service
from tests.support.krun_port import KrunPort
from tests.support.metadata_server import closed_port
from tests.support.tcp_peer import TcpPeer, TcpServer

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
GRPC = [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
SETTINGS = bytes.fromhex("000000 04 00 00000000")


@pytest.fixture
def settings(app: TcpServer) -> Settings:
    return Settings(app=Address("127.0.0.1", app.port))


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_protocol, "SILENCE_S", 0.1)


async def answered_in_http_1(app: TcpServer, stream: PeerStream, path: bytes = b"/") -> TcpPeer:
    """The connection over which the app is asked in HTTP/1.1, and answers."""
    there = await app.accept()
    assert (await there.read_until(b"\r\n\r\n")).startswith(b"GET " + path + b" HTTP/1.1\r\n")
    await there.send(OK)
    assert await stream.rest() == b"ok"
    return there


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n", id="most"),
        pytest.param(b"<!DOCTYPE HTML>\n", id="Python's http.server, which takes it for HTTP/0.9"),
        pytest.param(b"", id="closes"),
        pytest.param(b"\x15\x03\x01\x00\x02\x02\x16", id="a TLS alert"),
    ],
)
async def test_an_http_1_app(peer: Http2Peer, app: TcpServer, words: bytes) -> None:
    stream = peer.request(b"GET", b"/", end=True)
    there = await app.accept()
    assert (await there.read_until(PREFACE)) == PREFACE
    await there.send(words)
    there.end()
    there = await answered_in_http_1(app, stream)
    assert app.count == 2
    stream = peer.request(b"GET", b"/again", end=True)
    await there.read_until(b"\r\n\r\n")
    await there.send(OK)
    assert await stream.rest() == b"ok"
    assert app.count == 2, "and it is not asked again"


async def test_an_app_that_resets_what_it_does_not_understand(peer: Http2Peer, app: TcpServer) -> None:
    stream = peer.request(b"GET", b"/", end=True)
    (await app.accept()).reset()
    await answered_in_http_1(app, stream)


@pytest.mark.usefixtures("soon")
async def test_an_app_that_waits_for_more(peer: Http2Peer, app: TcpServer) -> None:
    stream = peer.request(b"GET", b"/", end=True)
    asked = await app.accept()
    await answered_in_http_1(app, stream)
    assert (await asked.rest()).startswith(PREFACE), "and then FIN"


@pytest.mark.usefixtures("soon")
async def test_grpc_is_told_in_http_2_to_an_app_that_says_nothing(peer: Http2Peer, app: TcpServer) -> None:
    peer.request(b"POST", b"/package.Service/Method", GRPC)
    await app.accept()
    there = await app.accept()
    assert (await there.read(len(PREFACE))) == PREFACE


@pytest.mark.parametrize("kind", [b"application/grpc", b"application/grpc+proto", b"text/plain"])
async def test_an_h2c_app(kind: bytes) -> None:
    async with Service.listening() as app:
        settings = Settings(app=Address("127.0.0.1", app.port))
        async with KrunPort.serving(settings) as krun, Http2Peer.connected(krun.port) as peer:
            stream = peer.request(b"POST", b"/", [(b"content-type", kind)], end=True)
            (await app.request()).respond(200, end=True)
            assert await stream.status() == 200


async def test_requests_that_come_meanwhile_wait(peer: Http2Peer, app: TcpServer) -> None:
    streams = [peer.request(b"GET", b"/", end=True) for _ in range(5)]
    asked = await app.accept()
    await peer.answered()
    assert app.count == 1
    asked.end()
    for _ in streams:
        there = await app.accept()
        await there.read_until(b"\r\n\r\n")
        await there.send(OK)
    for stream in streams:
        assert await stream.rest() == b"ok"
    assert app.count == 6


async def test_a_client_that_leaves_meanwhile(peer: Http2Peer, app: TcpServer) -> None:
    stream = peer.request(b"GET", b"/gone", end=True)
    asked = await app.accept()
    stream.reset(8)
    await peer.answered()
    asked.end()
    stream = peer.request(b"GET", b"/next", end=True)
    await answered_in_http_1(app, stream, b"/next")
    assert app.count == 2


async def test_an_app_that_is_not_there() -> None:
    port = closed_port()
    settings = Settings(app=Address("127.0.0.1", port))
    async with KrunPort.serving(settings) as krun, Http2Peer.connected(krun.port) as peer:
        for _ in range(2):
            stream = peer.request(b"GET", b"/", end=True)
            assert await stream.status() == 503
            assert await stream.rest() == f"app at 127.0.0.1:{port}: connection refused\n".encode()
        async with TcpServer.listening(port) as app:
            stream = peer.request(b"GET", b"/", end=True)
            (await app.accept()).end()
            await answered_in_http_1(app, stream)  # nothing was remembered


async def test_an_app_that_comes_back_as_another(peer: Http2Peer, app: TcpServer) -> None:
    stream = peer.request(b"GET", b"/", end=True)
    (await app.accept()).end()
    there = await app.accept()
    await there.read_until(b"\r\n\r\n")
    await there.send(SETTINGS)
    assert await stream.status() == 502
    stream = peer.request(b"GET", b"/", end=True)
    there = await app.accept()
    assert await there.read(len(PREFACE)) == PREFACE, "it is asked again"
    await there.send(SETTINGS)
    there = await app.accept()
    assert await there.read(len(PREFACE)) == PREFACE
    there.end()
    there = await app.accept()
    assert await there.read(len(PREFACE)) == PREFACE, "and again"
    there.end()
    await answered_in_http_1(app, stream)


async def test_what_is_said_in_the_log(app: TcpServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hbone.app")
    address = Address("127.0.0.1", app.port)
    for told, words, line in (
        (None, b"", f"app at {address}: does not speak HTTP/2, so it is asked in HTTP/1.1"),
        (None, SETTINGS, f"app at {address}: speaks HTTP/2"),
        ("h2c", b"", f"app at {address}: gives no answer in HTTP/2, which HBONE_APP_PROTOCOL says"),
    ):
        caplog.clear()
        protocol = AppProtocol(address, told, 10)  # type: ignore[arg-type]  # of the three
        asking = spawn(protocol.find_out(), name="ask")
        there = await app.accept()
        await there.send(words)
        there.end()
        await asking
        assert caplog.messages == [line]


@pytest.mark.parametrize(
    ("settings", "known", "extended"),
    [
        pytest.param("000000 04 00 00000000", "h2c", False, id="none"),
        pytest.param("000006 04 00 00000000 0008 00000001", "h2c", True, id="extended CONNECT"),
        pytest.param("000006 04 00 00000000 0008 00000000", "h2c", False, id="no extended CONNECT"),
        pytest.param("000006 04 00 00000000 0008 00000002", "http1", False, id="a wrong value"),
        pytest.param("000005 04 00 00000000 0008000000", "http1", False, id="a wrong length"),
        pytest.param("000000 04 01 00000000", "http1", False, id="an acknowledgement"),
        pytest.param("000000 04 00 00000001", "http1", False, id="on a stream"),
        pytest.param("fffffc 04 00 00000000", "http1", False, id="too long"),
        pytest.param("000008 07 00 00000000 0000000000000001", "http1", False, id="GOAWAY"),
    ],
)
async def test_which_first_words_are_http_2(
    app: TcpServer, settings: str, known: str, extended: bool
) -> None:
    protocol = AppProtocol(Address("127.0.0.1", app.port), None, 10)
    asking = spawn(protocol.find_out(), name="ask")
    there = await app.accept()
    for byte in bytes.fromhex(settings):
        await there.send(bytes([byte]))
    await asking
    assert (protocol.known, protocol.extended_connect, protocol.was_silent) == (known, extended, False)


async def test_who_is_told_asks_only_for_settings() -> None:
    assert AppProtocol(Address("127.0.0.1", 1), "http1", 10).known == "http1"
    protocol = AppProtocol(Address("127.0.0.1", closed_port()), "h2c", 10)
    assert protocol.known is None
    with pytest.raises(DialError):
        await protocol.find_out()


async def test_stopping_while_the_app_is_asked(app: TcpServer) -> None:
    protocol = AppProtocol(Address("127.0.0.1", app.port), None, 10)
    asking = spawn(protocol.find_out(), name="ask")
    there = await app.accept()
    protocol.close()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await there.was_reset()

"""Which way a request goes to the app where several would do, and what is held for it."""

from __future__ import annotations

import pytest

from agent.config.settings import Settings
from shared.address import Address
from tests.shared.http2.dialogue import PREFACE
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.krun_port import KrunPort
from tests.support.tcp_peer import TcpPeer, TcpServer

SETTINGS = bytes.fromhex("000000 04 00 00000000")
SETTINGS_WITH_FEW_HEADERS = bytes.fromhex("000006 04 00 00000000 0006 00000100")
SETTINGS_WITH_CONNECT = bytes.fromhex("000006 04 00 00000000 0008 00000001")
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@pytest.fixture
def settings(app: TcpServer) -> Settings:
    return Settings(app=Address("127.0.0.1", app.port))


async def websocket(
    peer: Http2Peer, app: TcpServer, words: bytes, protocol: bytes = b"websocket"
) -> PeerStream:
    """Asked for of an app that says `words` when it is asked what it speaks."""
    stream = peer.websocket(b"/chat", protocol=protocol)
    there = await app.accept()
    await there.send(words)
    there.end()
    return stream


async def first_bytes(there: TcpPeer) -> bytes:
    return await there.read(len(PREFACE))


async def test_a_websocket_to_an_http_1_app(peer: Http2Peer, app: TcpServer) -> None:
    await websocket(peer, app, b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert (await first_bytes(await app.accept())).startswith(b"GET /chat HTTP/1.1\r\n")


async def test_to_an_http_2_app_that_takes_it(peer: Http2Peer, app: TcpServer) -> None:
    await websocket(peer, app, SETTINGS_WITH_CONNECT)
    assert await first_bytes(await app.accept()) == PREFACE


async def test_to_an_http_2_app_that_does_not(peer: Http2Peer, app: TcpServer) -> None:
    """Most of those that speak HTTP/2 without TLS speak HTTP/1.1 as well: nginx, Go, Hypercorn."""
    await websocket(peer, app, SETTINGS)
    assert (await first_bytes(await app.accept())).startswith(b"GET /chat HTTP/1.1\r\n")


async def test_another_protocol_to_one_that_does_not(peer: Http2Peer, app: TcpServer) -> None:
    stream = await websocket(peer, app, SETTINGS, protocol=b"connect-udp")
    assert await stream.status() == 501


async def test_more_headers_than_the_app_accepts(peer: Http2Peer, app: TcpServer) -> None:
    """Hypercorn and Netty end the connection for it, which is that of all clients."""
    stream = peer.request(b"GET", b"/", [(b"x-long", b"a" * 200)], end=True)
    there = await app.accept()
    await there.send(SETTINGS_WITH_FEW_HEADERS)
    there.end()
    assert await stream.status() == 431
    assert (await stream.rest()).endswith(b"the app accepts 256\n")
    peer.request(b"GET", b"/", end=True)
    assert await first_bytes(await app.accept()) == PREFACE


async def test_what_a_client_has_yet_to_read_counts(krun: KrunPort, peer: Http2Peer, app: TcpServer) -> None:
    stream = peer.request(b"GET", b"/", end=True)
    stream.window_held = True
    (await app.accept()).end()
    there = await app.accept()
    await there.read_until(b"\r\n\r\n")
    size = 100_000
    await there.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size))
    proxy = krun.requests.app
    while proxy.open_requests:
        await peer.answered()
    assert proxy.buffered_bytes == size - 65535, "but for h2's window"
    stream.release_window()
    assert await stream.rest() == bytes(size)
    assert proxy.buffered_bytes == 0

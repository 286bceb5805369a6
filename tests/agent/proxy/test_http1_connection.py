"""WebSockets to an app that speaks HTTP/1.1: opened by extended CONNECT; the app is a raw socket.

Ordinary requests on such connections are `tests/agent/tunnels/test_app_proxy.py`'s.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import replace

import pytest

from agent.config.settings import Settings
from shared.http2.frames import CANCEL, CONNECT_ERROR
from shared.net.relay import tunnel_clock
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.krun_port import KrunPort, answered_and_ended
from tests.support.tcp_peer import TcpPeer, TcpServer

VERSION = (b"sec-websocket-version", b"13")


async def head_of(app: TcpPeer) -> tuple[str, dict[str, str]]:
    line, *fields = (await app.read_until(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
    return line, dict(tuple(field.split(": ", 1)) for field in fields)  # type: ignore[misc]  # pairs


def agreement(key: str, *fields: bytes) -> bytes:
    """What a server answers to the key of a WebSocket (RFC 6455 section 1.3)."""
    digest = hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
    lines = [
        b"HTTP/1.1 101 Switching Protocols",
        b"Upgrade: WebSocket",
        b"Connection: Upgrade",
        b"Sec-WebSocket-Accept: " + base64.b64encode(digest),
        *fields,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def opened(peer: Http2Peer, app: TcpServer) -> tuple[PeerStream, TcpPeer]:
    """A WebSocket that stands."""
    stream = peer.websocket(b"/chat", [VERSION])
    there = await app.accept()
    _, fields = await head_of(there)
    await there.send(agreement(fields["sec-websocket-key"]))
    assert await stream.status() == 200
    return stream, there


async def test_krun_says_that_it_takes_them(peer: Http2Peer) -> None:
    await peer.answered()
    assert peer.takes_extended_connect, "SETTINGS_ENABLE_CONNECT_PROTOCOL (RFC 8441 section 3)"


async def test_a_websocket_is_asked_for_by_upgrade(peer: Http2Peer, app: TcpServer) -> None:
    stream = peer.websocket(
        b"/chat?room=1", [VERSION, (b"sec-websocket-protocol", b"chat"), (b"origin", b"https://x")]
    )
    there = await app.accept()
    line, fields = await head_of(there)
    assert line == "GET /chat?room=1 HTTP/1.1"
    key = fields.pop("sec-websocket-key")
    assert len(base64.b64decode(key)) == 16
    assert fields == {
        "host": "app",
        "sec-websocket-version": "13",
        "sec-websocket-protocol": "chat",
        "origin": "https://x",
        "connection": "Upgrade",
        "upgrade": "websocket",
    }
    await there.send(agreement(key, b"Sec-WebSocket-Protocol: chat"))
    assert await stream.status() == 200
    assert stream.fields == [(b":status", b"200"), (b"sec-websocket-protocol", b"chat")]


async def test_bytes_pass_both_ways_and_ends_too(peer: Http2Peer, app: TcpServer) -> None:
    stream, there = await opened(peer, app)
    await stream.send(b"ping")
    assert await there.read(4) == b"ping"
    await answered_and_ended(stream, there)


async def test_what_comes_before_the_agreement_waits_for_it(peer: Http2Peer, app: TcpServer) -> None:
    stream = peer.websocket(b"/", [VERSION])
    await stream.send(b"early")
    there = await app.accept()
    _, fields = await head_of(there)
    await peer.answered()
    await there.send(agreement(fields["sec-websocket-key"]) + b"first")
    assert await stream.read(5) == b"first", "in the same read as the agreement"
    assert await there.read(5) == b"early"


async def test_a_key_of_the_clients_is_not_passed_on(peer: Http2Peer, app: TcpServer) -> None:
    peer.websocket(b"/", [VERSION, (b"sec-websocket-key", b"forged"), (b"sec_websocket_key", b"forged")])
    there = await app.accept()
    head = await there.read_until(b"\r\n\r\n")
    assert b"forged" not in head
    assert head.count(b"sec-websocket-key: ") == 1


async def test_an_app_that_refuses(peer: Http2Peer, app: TcpServer) -> None:
    stream = peer.websocket(b"/", [VERSION])
    there = await app.accept()
    await head_of(there)
    await there.send(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\nno")
    assert await stream.status() == 403
    assert await stream.rest() == b"no"
    assert await there.rest() == b"", "nothing else goes over a connection that was asked to switch"


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nsec-websocket-accept: x\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"",
    ],
)
async def test_an_app_that_does_not_know_what_it_was_asked(
    peer: Http2Peer, app: TcpServer, response: bytes
) -> None:
    stream = peer.websocket(b"/", [VERSION])
    there = await app.accept()
    await head_of(there)
    await there.send(response)
    there.end()
    assert await stream.status() == 502, "2xx would be a WebSocket to the client"


@pytest.mark.parametrize("protocol", [b"h2c", b"connect-udp", b"websocket\r\nx: y", b"tls"])
async def test_other_protocols_are_not_asked_for(peer: Http2Peer, app: TcpServer, protocol: bytes) -> None:
    stream = peer.websocket(b"/", protocol=protocol)
    if b"\r" in protocol:
        assert await stream.broken() == 1, "PROTOCOL_ERROR"
    else:
        assert await stream.status() == 501
    assert app.count == 0


async def test_a_plain_connect_is_no_request(peer: Http2Peer, app: TcpServer) -> None:
    assert await peer.request(b"CONNECT", b"", authority=b"10.0.0.1:80").status() == 405
    assert app.count == 0


async def test_an_app_that_breaks_off(peer: Http2Peer, app: TcpServer) -> None:
    stream, there = await opened(peer, app)
    there.reset()
    assert await stream.broken() == CONNECT_ERROR


async def test_a_client_that_breaks_off(peer: Http2Peer, app: TcpServer) -> None:
    stream, there = await opened(peer, app)
    stream.reset(CANCEL)
    assert await there.was_reset()


async def test_a_client_that_leaves_before_the_agreement(peer: Http2Peer, app: TcpServer) -> None:
    stream = peer.websocket(b"/", [VERSION])
    there = await app.accept()
    await head_of(there)
    stream.reset(CANCEL)
    assert await there.was_reset()


async def test_a_silent_one_ends_like_any_tunnel(
    settings: Settings, app: TcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel_clock, "LEAST_INTERVAL_S", 0.02)
    settings = replace(settings, idle_timeout_s=0.2)
    async with KrunPort.serving(settings) as krun, Http2Peer.connected(krun.port) as peer:
        stream, there = await opened(peer, app)
        assert krun.requests.app.open_requests == 1
        assert await stream.broken() == CONNECT_ERROR
        assert await there.was_reset()
        assert krun.requests.app.open_requests == 0


async def test_one_that_is_forgotten_half_closed(settings: Settings, app: TcpServer) -> None:
    settings = replace(settings, half_closed_timeout_s=0.1)
    async with KrunPort.serving(settings) as krun, Http2Peer.connected(krun.port) as peer:
        stream, there = await opened(peer, app)
        there.end()
        assert await stream.broken() == CONNECT_ERROR


@pytest.mark.parametrize("length", [b"content-length: 2\r\n", b"connection: close\r\n", b""])
async def test_what_a_client_sends_ahead_never_reaches_an_app_that_refuses(
    peer: Http2Peer, app: TcpServer, length: bytes
) -> None:
    """To the app it would be another request, past what krun takes out of requests."""
    stream = peer.websocket(b"/", [VERSION])
    await stream.send(b"GET /admin HTTP/1.1\r\nx-forwarded-client-cert: forged\r\n\r\n")
    there = await app.accept()
    await head_of(there)
    await peer.answered()
    await there.send(b"HTTP/1.1 403 Forbidden\r\n" + length + b"\r\nno")
    await stream.status()
    await stream.send(b"GET /admin HTTP/1.1\r\n\r\n")
    if not length.startswith(b"content-length"):
        there.end()
    assert await stream.rest() == b"no"
    assert await there.rest() == b""

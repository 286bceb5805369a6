"""Streams of an h2c app: where they come from, and what is told when there are none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from agent.config.settings import Settings
from agent.proxy import app_protocol
from agent.proxy.http2_pool import LIMITS
from shared.address import Address
from shared.http2.frames import CANCEL
from tests.support.http2_peer import Http2Peer, Service
from tests.support.krun_port import KrunPort
from tests.support.tcp_peer import TcpServer


@pytest.fixture
async def app() -> AsyncIterator[Service]:
    async with Service.listening() as app:
        yield app


@pytest.fixture
def settings(app: Service) -> Settings:
    return Settings(app=Address("127.0.0.1", app.port), app_protocol="h2c")


def test_one_slow_client_cannot_stop_the_others() -> None:
    assert LIMITS.connection_window_bytes >= 100 * LIMITS.stream_window_bytes


async def test_more_than_a_connection_carries(krun: KrunPort, peer: Http2Peer, app: Service) -> None:
    count = 120  # the pool puts 100 on each
    streams = [peer.request(b"GET", b"/", end=True) for _ in range(count)]
    there = [await app.request() for _ in range(count)]
    assert krun.requests.app.open_requests == count
    for stream in there:
        stream.respond(200, end=True)
    for stream in streams:
        assert await stream.status() == 200
    assert len({id(stream.peer) for stream in there}) == 2


async def test_an_app_that_is_away(peer: Http2Peer, app: Service) -> None:
    stream = peer.request(b"GET", b"/", end=True)
    (await app.request()).respond(200, end=True)
    assert await stream.status() == 200
    app.stop_listening()
    for connection in app.connections:
        connection.drop()
    stream = peer.request(b"GET", b"/", end=True)
    assert await stream.status() == 503
    text = f"app at 127.0.0.1:{app.port}: connection refused\n"
    assert await stream.rest() == text.encode()
    async with Service.listening(port=app.port) as back:
        stream = peer.request(b"GET", b"/", end=True)
        (await back.request()).respond(200, end=True)
        assert await stream.status() == 200, "at once"


async def test_an_app_that_never_says_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_protocol, "SILENCE_S", 0.05)
    async with (
        TcpServer.listening() as app,
        KrunPort.serving(Settings(app=Address("127.0.0.1", app.port), app_protocol="h2c")) as krun,
        Http2Peer.connected(krun.port) as peer,
    ):
        stream = peer.request(b"GET", b"/", end=True)
        await app.accept()
        there = await app.accept()
        await there.read(24)
        await there.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        (await app.accept()).end()  # asked again: what was wrong may have been mended
        (await app.accept()).end()
        assert await stream.status() == 502


async def test_a_client_that_leaves_while_a_stream_is_awaited(
    krun: KrunPort, peer: Http2Peer, app: Service
) -> None:
    stream = peer.request(b"GET", b"/", end=True)
    await asyncio.sleep(0)
    stream.reset(CANCEL)
    await peer.answered()
    assert krun.requests.app.open_requests == 0
    stream = peer.request(b"GET", b"/next", end=True)
    there = await app.request()
    assert there[b":path"] == b"/next"
    there.respond(200, end=True)
    assert await stream.status() == 200

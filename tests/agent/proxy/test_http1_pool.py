"""Connections to an HTTP/1.1 app: how many are kept, for how long, and what a dial may take."""

from __future__ import annotations

import asyncio

import pytest

from agent.config.settings import Settings
from agent.proxy import http1_pool
from agent.proxy.app_requests import AppRequests
from shared.address import Address
from shared.http2.frames import CANCEL
from tests.shared.net.loopback import until
from tests.support.http2_peer import Http2Peer
from tests.support.krun_port import KrunPort
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def kept(krun: KrunPort) -> tuple[int, int]:
    """How many connections to the app are open, and how many of them wait for a request."""
    requests = krun.requests.app._proxy._requests
    assert isinstance(requests, AppRequests)
    return len(requests._http1._connections), len(requests._http1._idle)


async def asked_at_once(peer: Http2Peer, app: TcpServer, count: int) -> list[TcpPeer]:
    """So many requests, all of which have been answered: the connections they came over."""
    streams = [peer.request(b"GET", b"/", end=True) for _ in range(count)]
    apps = [await app.accept() for _ in range(count)]
    for there in apps:
        await there.read_until(b"\r\n\r\n")
    for there in apps:
        await there.send(OK)
    for stream in streams:
        assert await stream.rest() == b"ok"
    return apps


async def test_each_request_at_the_same_time_has_its_own(
    krun: KrunPort, peer: Http2Peer, app: TcpServer
) -> None:
    await asked_at_once(peer, app, 5)
    assert (app.count, kept(krun)) == (5, (5, 5))


async def test_few_are_kept(
    krun: KrunPort, peer: Http2Peer, app: TcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1_pool, "MAX_IDLE", 2)
    apps = await asked_at_once(peer, app, 5)
    assert kept(krun) == (2, 2)
    ended = [asyncio.ensure_future(there.rest()) for there in apps]  # noqa: TID251  # the test's own
    done, left = await asyncio.wait(ended, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    while len(done) < 3:
        more, left = await asyncio.wait(left, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        done |= more
    for task in left:
        task.cancel()


async def test_none_is_kept_for_long(
    krun: KrunPort, peer: Http2Peer, app: TcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1_pool, "KEEP_S", 0.05)
    for there in await asked_at_once(peer, app, 3):
        assert await there.rest() == b"", "FIN"
    assert kept(krun) == (0, 0)
    await asked_at_once(peer, app, 1)


async def test_one_with_an_answer_to_head_is_not_kept(
    krun: KrunPort, peer: Http2Peer, app: TcpServer
) -> None:
    """Some apps send a body after it. It would be the answer to somebody else's request."""
    stream = peer.request(b"HEAD", b"/", end=True)
    first = await app.accept()
    await first.read_until(b"\r\n\r\n")
    await first.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
    assert await stream.status() == 200
    assert await stream.rest() == b""
    assert kept(krun) == (0, 0)
    await asked_at_once(peer, app, 1)


async def test_one_that_the_app_closes_is_forgotten(krun: KrunPort, peer: Http2Peer, app: TcpServer) -> None:
    first, second = await asked_at_once(peer, app, 2)
    first.end()
    second.reset()
    await until(lambda: kept(krun) == (0, 0))
    await asked_at_once(peer, app, 1)
    assert app.count == 3


async def test_a_dial_has_a_deadline(full_port: int) -> None:
    settings = Settings(app=Address("127.0.0.1", full_port), app_protocol="http1", dial_timeout_s=0.2)
    async with KrunPort.serving(settings) as krun, Http2Peer.connected(krun.port) as peer:
        stream = peer.request(b"GET", b"/", end=True)
        assert await stream.status() == 503
        assert await stream.rest() == f"app at 127.0.0.1:{full_port}: no answer within 0.2 s\n".encode()


async def test_a_client_that_leaves_while_the_app_is_dialled(full_port: int) -> None:
    settings = Settings(app=Address("127.0.0.1", full_port), app_protocol="http1", dial_timeout_s=60)
    async with KrunPort.serving(settings) as krun, Http2Peer.connected(krun.port) as peer:
        stream = peer.request(b"GET", b"/", end=True)
        await peer.answered()
        assert krun.requests.app.open_requests == 1
        stream.reset(CANCEL)
        await peer.answered()
        assert krun.requests.app.open_requests == 0


async def test_closing_cuts_off_what_is_open(krun: KrunPort, peer: Http2Peer, app: TcpServer) -> None:
    stream = peer.request(b"GET", b"/", end=True)
    there = await app.accept()
    await there.read_until(b"\r\n\r\n")
    krun.requests.close()
    assert await stream.status() == 502
    assert await there.was_reset()

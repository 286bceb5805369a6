"""How requests to the app fail is told in the log; `test_requests.py` and `test_app_proxy.py` have the
rest."""

from __future__ import annotations

import asyncio

import pytest

from agent.config.settings import Settings
from agent.proxy.http1_connection import PIECE_BYTES
from shared.address import Address
from shared.errors import LimitError, OverloadError
from shared.http2.frames import CANCEL, ENHANCE_YOUR_CALM, MAX_PAYLOAD_BYTES
from shared.net.legs.small_writes import MARK_BYTES
from tests.shared.net.loopback import until
from tests.support.http2_peer import Http2Peer
from tests.support.krun_port import KrunPort
from tests.support.metadata_server import closed_port
from tests.support.tcp_peer import PATIENCE_S, TcpServer

LOOPBACK = "127.0.0.1"


@pytest.fixture
def settings(app: TcpServer) -> Settings:
    return Settings(app=Address(LOOPBACK, app.port), app_protocol="http1", max_requests=2)


async def test_an_app_that_speaks_something_else(
    peer: Http2Peer, app: TcpServer, caplog: pytest.LogCaptureFixture
) -> None:
    stream = peer.request(b"GET", b"/", end=True)
    there = await app.accept()
    await there.read_until(b"\r\n\r\n")
    await there.send(b"what is this\r\n\r\n")
    assert await stream.status() == 502
    assert caplog.messages[0].startswith("502: the app does not speak HTTP/1.1")
    assert caplog.messages[0].endswith("HBONE_APP_PROTOCOL says what it speaks")


async def test_an_app_that_speaks_no_http() -> None:
    settings = Settings(app_protocol="tcp")
    async with KrunPort.serving(settings) as krun, Http2Peer.connected(krun.port) as peer:
        stream = peer.request(b"GET", b"/", end=True)
        assert await stream.status() == 404
        assert await stream.rest() == b"no tunnel, and the app speaks no HTTP (HBONE_APP_PROTOCOL=tcp)\n"


async def test_a_request_that_the_client_gives_up_is_nobody_s_failure(
    krun: KrunPort, peer: Http2Peer, app: TcpServer, caplog: pytest.LogCaptureFixture
) -> None:
    stream = peer.request(b"GET", b"/", end=True)
    there = await app.accept()
    await there.read_until(b"\r\n\r\n")
    assert krun.requests.app.open_requests == 1
    stream.reset(CANCEL)
    assert await there.was_reset()
    krun.requests.close()
    assert caplog.messages == []


# Bounds.


async def test_one_request_too_many(
    krun: KrunPort, peer: Http2Peer, app: TcpServer, caplog: pytest.LogCaptureFixture
) -> None:
    streams = [peer.request(b"GET", b"/", end=True) for _ in range(2)]
    apps = [await app.accept() for _ in streams]
    one_too_many = peer.request(b"GET", b"/", end=True)
    assert await one_too_many.status() == 503
    assert await one_too_many.rest() == b"2 requests to the app are open, which is HBONE_MAX_REQUESTS\n"
    assert caplog.messages == [
        "503 to a request to the app: 2 requests to the app are open, which is HBONE_MAX_REQUESTS"
    ]
    await apps[0].read_until(b"\r\n\r\n")
    await apps[0].send(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert [await stream.status() for stream in streams if stream.number == 1] == [204]
    await until(lambda: krun.requests.app.open_requests == 1)
    peer.request(b"GET", b"/", end=True)
    await apps[0].read_until(b"\r\n\r\n")


async def test_while_too_much_is_held_nothing_new_is_taken() -> None:
    settings = Settings(app=Address(LOOPBACK, closed_port()), sshd=Address(LOOPBACK, closed_port()))
    error = LimitError("too much is held", "HBONE_MAX_BUFFERED")
    async with (
        KrunPort.serving(settings, refusal=lambda: error) as krun,
        Http2Peer.connected(krun.port) as peer,
    ):
        request = peer.request(b"GET", b"/", end=True)
        assert (await request.status(), await request.rest()) == (503, b"too much is held\n")
        tunnel = peer.request(b"POST", b"/_hbone/22")
        assert (await tunnel.status(), await tunnel.rest()) == (503, b"too much is held\n")
        assert (await krun.record()).flag == "LIMIT"


async def test_what_requests_hold_and_how_they_are_ended(
    krun: KrunPort, peer: Http2Peer, app: TcpServer
) -> None:
    upload = peer.request(b"POST", b"/")
    there = await app.accept()
    there.pause()
    sent = await upload.fill()
    assert sent >= 1 << 20
    [held] = krun.requests.app.holders()
    # The client may send a window more while one piece waits here, and one above the mark of the leg to the
    # app; the frame that crosses a bound counts, too.
    most = (1 << 20) + 2 * PIECE_BYTES + MARK_BYTES + MAX_PAYLOAD_BYTES
    assert 1 << 19 <= held.buffered_bytes <= most
    held.abort(OverloadError("it holds most"))
    assert (await upload.status(), await upload.rest()) == (503, b"it holds most\n")
    there.resume()
    assert await there.was_reset()
    held.abort(OverloadError("nothing more happens"))
    download = peer.request(b"GET", b"/", end=True)
    download.window_held = True
    there = await app.accept()
    await there.read_until(b"\r\n\r\n")
    there.send_soon(b"HTTP/1.1 200 OK\r\ncontent-length: 9000000\r\n\r\n" + bytes(9_000_000))
    assert await download.status() == 200
    async with asyncio.timeout(PATIENCE_S):
        while not (found := [one for one in krun.requests.app.holders() if one.buffered_bytes]):
            await peer.answered()
    found[0].abort(OverloadError("it holds most"))
    assert await download.broken() == ENHANCE_YOUR_CALM, "what has come is not the whole"

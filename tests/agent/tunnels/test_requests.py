"""What a stream on 15009 asks for, with real targets on loopback; the peer is played by the h2 library."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from agent.config.settings import Settings
from agent.tunnels.tunnel_port import LIMITS
from shared.address import Address
from shared.errors import Flag
from shared.http2 import frames
from shared.http2.frames import CANCEL, CONNECT_ERROR
from shared.net.relay import tunnel_clock
from shared.tunnel.tunnel_server import GONE
from tests.shared.http2.dialogue import (
    POST,
    PREFACE,
    data,
    headers,
    reset,
    settings,
)
from tests.support.http2_peer import Http2Peer
from tests.support.krun_port import KrunPort
from tests.support.metadata_server import closed_port
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer

BIG = bytes(range(256)) * 4096
"""1 MiB: a stream's whole window."""

LOOPBACK = "127.0.0.1"


@pytest.fixture
async def krun(target: TcpServer) -> AsyncIterator[KrunPort]:
    """Every target is `target`, but for GONE, where nobody listens."""
    there = Address(LOOPBACK, target.port)
    gone = Address(LOOPBACK, closed_port())
    settings = Settings(inbound_listen=there, sshd=there, targets={"DB": there, "GONE": gone})
    async with KrunPort.serving(settings) as krun:
        yield krun


# Names.


@pytest.mark.parametrize("name", ["15003", "22", "DB", "db", "db?trace=1"])
async def test_a_target_by_its_name(krun: KrunPort, peer: Http2Peer, target: TcpServer, name: str) -> None:
    stream = peer.request(b"POST", f"/_hbone/{name}".encode())
    there = await target.accept()
    assert await stream.status() == 200
    assert stream.fields == [(b":status", b"200")]
    await stream.send(b"ping")
    assert await there.read(4) == b"ping"
    await there.send(b"pong")
    assert await stream.read(4) == b"pong"
    assert krun.open_streams == 1
    there.end()
    stream.end()
    record = await krun.record()
    assert record == replace(
        record,
        name=name.partition("?")[0],
        target=Address(LOOPBACK, target.port),
        status=200,
        sent_bytes=4,
        received_bytes=4,
        error=None,
        flag=Flag.NONE,
    )
    assert krun.open_streams == 0


@pytest.mark.parametrize(
    ("method", "path", "status", "reason", "flag"),
    [
        (
            b"POST",
            b"/_hbone/nobody",
            404,
            b"no such target; known are 15003, 15008, 22, DB, GONE\n",
            "NO_ROUTE",
        ),
        (b"POST", b"/_hbone", 404, b"no such target; known are 15003, 15008, 22, DB, GONE\n", "NO_ROUTE"),
        (b"POST", b"/_hbone/443/_hbone/22", 404, b"no such target; known", "NO_ROUTE"),
        (b"POST", b"/_hbone/127.0.0.1:22", 404, b"no such target; known", "NO_ROUTE"),
        (b"GET", b"/_hbone/nobody", 404, b"no such target; known", "NO_ROUTE"),
        (b"GET", b"/_hbone/15003", 405, b"a tunnel is opened with POST\n", "DENY"),
        (b"PUT", b"/_hbone/DB", 405, b"a tunnel is opened with POST\n", "DENY"),
        (b"CONNECT", b"", 405, b"a tunnel is opened with POST\n", "DENY"),
    ],
)
async def test_a_refusal_says_why(
    krun: KrunPort,
    peer: Http2Peer,
    target: TcpServer,
    method: bytes,
    path: bytes,
    status: int,
    reason: bytes,
    flag: str,
) -> None:
    """A 404 of the original's own looked like the tunnel's bytes."""
    stream = peer.request(method, path)
    assert await stream.status() == status
    assert stream[b"content-type"] == b"text/plain; charset=utf-8"
    assert (await stream.rest()).startswith(reason)
    record = await krun.record()
    assert (record.status, record.flag) == (status, flag)
    assert str(record.error).encode() in reason or str(record.error).encode().startswith(reason)
    stream.end()
    await peer.answered()
    assert (target.count, krun.open_streams) == (0, 0)


# Dialling.


async def test_a_target_that_refuses(krun: KrunPort, peer: Http2Peer) -> None:
    """The original had said 200 before it dialled."""
    stream = peer.request(b"POST", b"/_hbone/GONE")
    assert await stream.status() == 503
    record = await krun.record()
    assert await stream.rest() == f"connect to {record.target}: connection refused\n".encode()
    assert (record.status, record.flag, record.name) == (503, "CONNECT", "GONE")
    stream.end()
    await peer.answered()
    assert krun.open_streams == 0


async def test_a_target_that_does_not_answer(full_port: int) -> None:
    settings = Settings(targets={"SLOW": Address(LOOPBACK, full_port)}, dial_timeout_s=0.2)
    async with KrunPort.serving(settings) as krun, Http2Peer.connected(krun.port) as peer:
        stream = peer.request(b"POST", b"/_hbone/SLOW")
        await peer.answered()
        assert stream.fields == [], "no 200 before the target is connected"
        assert await stream.status() == 503
        assert (await stream.rest()).endswith(b": no answer within 0.2 s\n")


async def test_a_peer_that_gives_up_while_the_target_is_dialled(full_port: int) -> None:
    settings = Settings(targets={"SLOW": Address(LOOPBACK, full_port)}, dial_timeout_s=60)
    async with KrunPort.serving(settings) as krun, Http2Peer.connected(krun.port) as peer:
        stream = peer.request(b"POST", b"/_hbone/SLOW")
        await peer.answered()
        stream.reset(CANCEL)
        record = await krun.record()
        assert (record.status, record.flag) == (GONE, "DOWNSTREAM_RESET")
        assert record.duration_s is not None
        assert record.duration_s < settings.dial_timeout_s, "nothing is dialled for nobody"
        await peer.answered()
        assert not peer.lost


async def test_a_peer_that_gives_up_before_the_200(
    krun: KrunPort, peer: Http2Peer, target: TcpServer
) -> None:
    stream = peer.request(b"POST", b"/_hbone/15003")
    stream.reset(CANCEL)
    record = await krun.record()
    assert (record.status, record.flag) == (GONE, "DOWNSTREAM_RESET")
    await peer.answered()
    assert (target.count, krun.open_streams) == (0, 0), "nothing is dialled for nobody"


async def test_what_comes_before_the_200_is_kept(peer: Http2Peer, target: TcpServer) -> None:
    stream = peer.request(b"POST", b"/_hbone/15003")
    await stream.send(b"early")
    stream.end()
    there = await target.accept()
    assert await there.rest() == b"early"
    await there.send(b"late")
    there.end()
    assert await stream.rest() == b"late"


# Bytes and ends.


async def test_many_bytes_both_ways_at_once(krun: KrunPort, peer: Http2Peer, target: TcpServer) -> None:
    stream = peer.request(b"POST", b"/_hbone/15003")
    there = await target.accept()
    there.send_soon(BIG * 5)
    there.end()
    async with asyncio.TaskGroup() as both:
        both.create_task(stream.send(BIG * 5))
        received = both.create_task(stream.rest())
        read = both.create_task(there.read(len(BIG) * 5))
    assert received.result() == BIG * 5
    assert read.result() == BIG * 5
    stream.end()
    assert await there.rest() == b""
    record = await krun.record()
    assert (record.sent_bytes, record.received_bytes, record.error) == (5 * len(BIG), 5 * len(BIG), None)


async def test_the_target_ends_first(krun: KrunPort, peer: Http2Peer, target: TcpServer) -> None:
    """The original could not end its side first."""
    stream = peer.request(b"POST", b"/_hbone/15003")
    there = await target.accept()
    await there.send(b"all I have")
    there.end()
    assert await stream.rest() == b"all I have"
    await stream.send(b"but I have more")
    stream.end()
    assert await there.rest() == b"but I have more"
    assert (await krun.record()).error is None


async def test_the_target_breaks_off(krun: KrunPort, peer: Http2Peer, target: TcpServer) -> None:
    stream = peer.request(b"POST", b"/_hbone/15003")
    there = await target.accept()
    assert await stream.status() == 200
    there.reset()
    assert await stream.broken() == CONNECT_ERROR
    record = await krun.record()
    assert (record.flag, krun.open_streams) == ("UPSTREAM_RESET", 0)


async def test_the_peer_breaks_off(krun: KrunPort, peer: Http2Peer, target: TcpServer) -> None:
    stream = peer.request(b"POST", b"/_hbone/15003")
    there = await target.accept()
    assert await stream.status() == 200
    stream.reset(CANCEL)
    assert await there.was_reset()
    record = await krun.record()
    assert (record.flag, str(record.error)) == ("DOWNSTREAM_RESET", "stream reset by the peer: CANCEL")


async def test_the_peers_connection_breaks(krun: KrunPort, target: TcpServer) -> None:
    async with Http2Peer.connected(krun.port) as peer:
        for _ in range(3):
            stream = peer.request(b"POST", b"/_hbone/15003")
            assert await stream.status() == 200
        peer.drop()
        for _ in range(3):
            assert await (await target.accept()).was_reset()
    assert {(await krun.record()).flag for _ in range(3)} == {"DOWNSTREAM_RESET"}
    assert krun.open_streams == 0


async def test_a_target_that_does_not_read_stops_its_tunnel_only(peer: Http2Peer, target: TcpServer) -> None:
    stalled = peer.request(b"POST", b"/_hbone/15003")
    there = await target.accept()
    there.pause()
    assert await stalled.status() == 200
    sent = await stalled.fill()
    assert sent >= len(BIG)
    stream = peer.request(b"POST", b"/_hbone/15003")
    other = await target.accept()
    await stream.send(BIG)
    stream.end()
    assert await other.rest() == BIG
    there.resume()
    stalled.end()
    assert len(await there.rest()) == sent


async def test_a_peer_that_does_not_read_stops_its_tunnel_only(peer: Http2Peer, target: TcpServer) -> None:
    stalled = peer.request(b"POST", b"/_hbone/15003")
    stalled.window_held = True
    there = await target.accept()
    there.send_soon(BIG * 16)
    there.end()
    await peer.until(lambda: len(stalled.data) == 65535)  # h2's window
    stream = peer.request(b"POST", b"/_hbone/15003")
    other = await target.accept()
    await other.send(BIG)
    other.end()
    stream.end()
    assert await stream.rest() == BIG
    stalled.release_window()
    stalled.end()
    assert await stalled.rest() == BIG * 16


async def test_many_tunnels_on_one_connection(krun: KrunPort, peer: Http2Peer, target: TcpServer) -> None:
    streams = [peer.request(b"POST", b"/_hbone/15003") for _ in range(100)]
    for stream in streams:
        await stream.send(stream.number.to_bytes(4, "big"))
    theirs: list[TcpPeer] = [await target.accept() for _ in streams]
    for there in theirs:
        await there.send(await there.read(4))
        there.end()
    for stream in streams:
        assert await stream.rest() == stream.number.to_bytes(4, "big")
    assert krun.open_streams == 100


# Limits.


async def test_one_tunnel_too_many(target: TcpServer) -> None:
    """Those that are refused, and requests to the app, do not count."""
    there = Address(LOOPBACK, target.port)
    settings = Settings(inbound_listen=there, app=there, max_tunnels=2)
    async with KrunPort.serving(settings) as krun, Http2Peer.connected(krun.port) as peer:
        assert await peer.request(b"POST", b"/_hbone/nowhere").status() == 404
        await krun.record()
        peer.request(b"GET", b"/")
        await target.accept()
        tunnels = [peer.request(b"POST", b"/_hbone/15003") for _ in range(2)]
        assert [await stream.status() for stream in tunnels] == [200, 200]
        one_too_many = peer.request(b"POST", b"/_hbone/15003")
        assert await one_too_many.status() == 503
        assert await one_too_many.rest() == b"2 tunnels are open, which is HBONE_MAX_TUNNELS\n"
        assert (await krun.record()).flag == "LIMIT"
        tunnels[0].reset(CANCEL)
        await krun.record()
        assert await peer.request(b"POST", b"/_hbone/15003").status() == 200
        assert krun.requests.open_tunnels == 2


async def test_a_silent_tunnel_is_reset(target: TcpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel_clock, "LEAST_INTERVAL_S", 0.02)
    settings = Settings(inbound_listen=Address(LOOPBACK, target.port), idle_timeout_s=0.2)
    async with KrunPort.serving(settings) as krun, Http2Peer.connected(krun.port) as peer:
        stream = peer.request(b"POST", b"/_hbone/15003")
        there = await target.accept()
        assert await stream.status() == 200
        assert await stream.broken() == CONNECT_ERROR
        assert await there.was_reset()
        record = await krun.record()
        assert (record.flag, record.status) == ("IDLE", 200)


async def test_a_front_end_with_one_client_that_resets_keeps_its_other_tunnels(
    krun: KrunPort, target: TcpServer
) -> None:
    """Spoken in frames: h2 would take nothing any more after the GOAWAY."""
    reader, writer = await asyncio.open_connection(LOOPBACK, krun.port)

    async def next_frame(kind: int) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                head = await reader.readexactly(frames.HEADER_BYTES)
                body = await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == kind:
                    return body

    writer.write(PREFACE + settings() + headers(1, POST))
    there = await target.accept()
    await next_frame(frames.HEADERS)
    budget = int(LIMITS.floods.resets)
    numbers = range(3, 3 + 2 * (budget + 10), 2)
    writer.write(b"".join(headers(number, POST) + reset(number, CANCEL) for number in numbers))
    goaway = await next_frame(frames.GOAWAY)
    assert int.from_bytes(goaway[4:], "big") == frames.NO_ERROR
    writer.write(data(1, b"ping"))
    assert await there.read(4) == b"ping"
    await there.send(b"pong")
    assert await next_frame(frames.DATA) == b"pong"
    numbers = range(numbers[-1] + 2, numbers[-1] + 2 + 2 * budget, 2)
    writer.write(b"".join(headers(number, POST) + reset(number, CANCEL) for number in numbers))
    goaway = await next_frame(frames.GOAWAY)
    assert int.from_bytes(goaway[4:], "big") == frames.ENHANCE_YOUR_CALM
    assert await there.was_reset()
    writer.close()
    await writer.wait_closed()


async def test_a_tunnel_that_is_forgotten_half_closed(target: TcpServer) -> None:
    settings = Settings(sshd=Address(LOOPBACK, target.port), half_closed_timeout_s=0.1)
    async with KrunPort.serving(settings) as krun, Http2Peer.connected(krun.port) as peer:
        stream = peer.request(b"POST", b"/_hbone/22")
        there = await target.accept()
        await there.send(b"bye")
        there.end()
        assert await stream.read(3) == b"bye"
        assert await stream.broken() == CONNECT_ERROR
        assert await there.was_reset()
        record = await krun.record()
        assert (record.flag, record.status, record.received_bytes) == ("HALF_CLOSED", 200, 3)
        assert krun.open_streams == 0

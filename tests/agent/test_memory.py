"""What krun holds for peers that do not read, measured on a real krun by its resident memory."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.address import Address
from tests.agent.test_app import Krun, krun
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.tcp_peer import PATIENCE_S, TcpServer

PAGE_KIB = 4
WINDOW_BYTES = 1 << 20
"""Of a stream of krun's."""

PIECE = bytes(64)
STREAMS = 3

ALLOWED_KIB = 12 << 10
"""More than the windows of all streams three times over: what they hold, twice while it is copied, and what
the first use of anything costs. Where each piece waits by itself it is three times as much."""


@pytest.fixture
def stalled() -> Iterator[Address]:
    """A server whose connections are never read from, nor even accepted."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.bind(("127.0.0.1", 0))
        server.listen(200)
        yield Address("127.0.0.1", server.getsockname()[1])


@asynccontextmanager
async def before(stalled: Address, **environ: str) -> AsyncIterator[tuple[Krun, Http2Peer]]:
    """krun whose app, and target X, is `stalled`."""
    async with krun(
        environ={"HBONE_APP": str(stalled), "PORT_X": str(stalled), **environ, "HBONE_APP_PROTOCOL": "http1"}
    ) as it:
        await it.listening()
        async with Http2Peer.connected(it.port) as peer:
            yield it, peer


def resident_kib(it: Krun) -> int:
    return int(Path(f"/proc/{it.process.pid}/statm").read_text().split()[1]) * PAGE_KIB


async def fill_kernel(stream: PeerStream) -> None:
    """Sends in large pieces until krun gives nothing back of some of it: from now on it holds what comes."""
    peer = stream.peer
    while peer.window_left(stream) > WINDOW_BYTES - 150_000:
        await peer.answered()
        await stream.send(bytes(min(100_000, peer.window_left(stream))))
        await peer.answered()


async def send_pieces(streams: list[PeerStream]) -> None:
    """Sends small pieces, each on its own, until no stream may send any more."""
    while live := [stream for stream in streams if stream.peer.window_left(stream) >= len(PIECE)]:
        for stream in live:
            await stream.send(PIECE)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.mark.parametrize("path", [b"/_hbone/X", b"/upload"], ids=["tunnel", "upload"])
async def test_small_pieces_cost_little_more_than_their_bytes(stalled: Address, path: bytes) -> None:
    async with before(stalled) as (it, peer):
        streams = [peer.request(b"POST", path) for _ in range(STREAMS)]
        await peer.answered()
        for stream in streams:
            await fill_kernel(stream)
        at_first = resident_kib(it)
        async with asyncio.timeout(4 * PATIENCE_S):
            await send_pieces(streams)
        await peer.answered()
        assert resident_kib(it) - at_first < ALLOWED_KIB


# The budget.


async def fill(streams: list[PeerStream]) -> None:
    """Sends on all of them until they are ended, or krun takes nothing more."""
    peer = streams[0].peer

    def may_send() -> list[PeerStream]:
        return [stream for stream in streams if peer.window(stream) > 0 and not is_over(stream)]

    while may_send():
        while live := may_send():
            for stream in live:
                await stream.send(bytes(min(16384, peer.window(stream))))
            await asyncio.sleep(0)
        await peer.answered()  # what it gives back comes before


def is_over(stream: PeerStream) -> bool:
    return (bool(stream.fields) and stream.fields[0] != (b":status", b"200")) or stream.reset_code is not None


async def test_uploads_that_nobody_reads_are_ended_before_they_take_all(stalled: Address) -> None:
    """Those that hold most; others are not touched, and what is new is served again."""
    async with (
        TcpServer.listening() as echo,
        before(stalled, HBONE_MAX_BUFFERED="2MiB", PORT_Y=f"127.0.0.1:{echo.port}") as (it, peer),
    ):
        tunnel = peer.request(b"POST", b"/_hbone/Y")
        there = await echo.accept()
        assert await tunnel.status() == 200
        uploads = [peer.request(b"POST", b"/upload") for _ in range(6)]
        await fill(uploads)
        await peer.until(lambda: sum(map(is_over, uploads)) >= 3)
        for upload in filter(is_over, uploads):
            assert await upload.status() == 503
            told = await upload.rest()
            assert told.startswith(b"it holds ")
            assert told.endswith(b" of 75% of HBONE_MAX_BUFFERED\n")
        await tunnel.send(b"ping")
        assert await there.read(4) == b"ping"
        await it.process.said("^a request to the app was ended: it holds .* of HBONE_MAX_BUFFERED")
        assert await peer.request(b"POST", b"/_hbone/Y").status() == 200, "requests keep no tunnel out"


async def test_tunnels_that_nobody_reads_are_ended(stalled: Address) -> None:
    async with before(stalled, HBONE_MAX_BUFFERED="2MiB", HBONE_DRAIN_TIMEOUT="0") as (it, peer):
        tunnels = [peer.request(b"POST", b"/_hbone/X") for _ in range(6)]
        for tunnel in tunnels:
            assert await tunnel.status() == 200
        await fill(tunnels)
        await peer.until(lambda: sum(map(is_over, tunnels)) >= 3)
        it.process.send(signal.SIGTERM)
        _, _, err = await it.process.ended()
    ended = [json.loads(line) for line in err.splitlines() if '"flags":"OVERLOAD"' in line]
    assert 3 <= len(ended) <= 6
    assert all("of HBONE_MAX_BUFFERED" in line["error"] for line in ended)

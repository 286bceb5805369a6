"""A tunnel that a peer asked for: connected first, answered after, and recorded once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from shared.address import Address
from shared.errors import DeniedError, DialError, HboneError, StreamResetError
from shared.http2.frames import CANCEL
from shared.listen import bound_address, listen
from shared.net.dial import dial
from shared.net.http2.connection import Connection
from shared.net.legs.contract import Leg
from shared.net.legs.stream import Stream
from shared.tunnel.tunnel_record import TunnelRecord
from shared.tunnel.tunnel_server import GONE, ServedTunnel
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.tcp_peer import PATIENCE_S, TcpServer

Connect = Callable[[], Awaitable[Leg]]
BIG = bytes(range(256)) * 4096


class Server:
    """Serves one tunnel, which `connect` leads to its target."""

    def __init__(self, connect: Connect) -> None:
        self.connect = connect
        self.tunnel: ServedTunnel
        self.task: asyncio.Task[None]
        self.ends = 0
        self.over = asyncio.Event()

    def take(self, stream: Stream) -> None:
        self.tunnel = ServedTunnel(
            stream, TunnelRecord(peer="peer:1", name="name", target=Address("target", 1)), self._finished
        )
        self.task = self.tunnel.carry(self.connect, "tunnel")

    async def ended(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.over.wait()

    def _finished(self, tunnel: ServedTunnel) -> None:
        assert tunnel is self.tunnel
        self.ends += 1
        self.over.set()


@asynccontextmanager
async def asked(connect: Connect, *, at_once: int | None = None) -> AsyncIterator[tuple[Server, PeerStream]]:
    """A server, and a peer's stream on which a tunnel has been asked for; the peer resets it in the same
    segment with the code `at_once`."""
    server = Server(connect)
    connections: list[Connection] = []

    def accept() -> Connection:
        connections.append(Connection(client=False, on_request=server.take))
        return connections[-1]

    listener = await listen(Address("127.0.0.1", 0), accept, purpose="test")
    try:
        async with Http2Peer.connected(bound_address(listener).port) as peer:
            stream = peer.request(b"CONNECT", b"", authority=b"a:1")
            if at_once is not None:
                stream.reset(at_once)
            await peer.answered()
            yield server, stream
    finally:
        listener.close()
        for connection in connections:
            connection.abort("the test is over")


def to(target: TcpServer) -> Connect:
    return lambda: dial(Address("127.0.0.1", target.port), PATIENCE_S)


def failing(error: BaseException) -> Connect:
    async def fail() -> Leg:
        raise error

    return fail


async def test_connected_then_answered_then_relayed_and_recorded(target: TcpServer) -> None:
    async with asked(to(target)) as (server, stream):
        there = await target.accept()
        assert await stream.status() == 200
        assert stream.fields == [(b":status", b"200")]
        await stream.send(b"ping")
        assert await there.read(4) == b"ping"
        stream.end()
        assert await there.rest() == b""
        await there.send(BIG)
        there.end()
        assert await stream.rest() == BIG
        await server.ended()
        record = server.tunnel.record
        assert (record.name, record.target, record.status) == ("name", Address("target", 1), 200)
        assert (record.sent_bytes, record.received_bytes) == (4, len(BIG))
        assert (record.flag, record.error, server.ends) == ("-", None, 1)
        assert server.tunnel.relay is None


async def test_nothing_is_answered_before_the_target_is_connected(target: TcpServer) -> None:
    ready = asyncio.Event()

    async def connect() -> Leg:
        await ready.wait()
        return await to(target)()

    async with asked(connect) as (server, stream):
        await stream.peer.answered()
        assert (stream.fields, server.tunnel.over) == ([], False)
        ready.set()
        assert await stream.status() == 200


@pytest.mark.parametrize(
    ("error", "status", "flag"),
    [
        (DialError("connect to a: connection refused"), 503, "CONNECT"),
        (DeniedError("peer denied"), 401, "DENY"),
    ],
)
async def test_each_way_to_fail_has_its_status(error: HboneError, status: int, flag: str) -> None:
    async with asked(failing(error)) as (server, stream):
        assert await stream.status() == status
        assert await stream.rest() == f"{error}\n".encode()
        record = server.tunnel.record
        assert (record.status, record.flag, record.error) == (status, flag, error)
        assert (record.sent_bytes, record.received_bytes, server.ends) == (0, 0, 1)


async def test_a_fault_of_ours_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    async with asked(failing(ZeroDivisionError("oops"))) as (server, stream):
        assert await stream.status() == 500
        assert await stream.rest() == b"a fault of ours: its log says more\n"
        await server.ended()
        assert server.tunnel.record.flag == "INTERNAL"
    assert "ZeroDivisionError" in caplog.text


async def test_a_peer_that_gives_up_while_the_target_is_connected() -> None:
    """Nothing goes on for nobody: neither the dial nor the tunnel."""
    async with asked(asyncio.Event().wait) as (server, stream):  # type: ignore[arg-type]  # never connects
        stream.reset(CANCEL)
        await server.ended()
        await asyncio.wait({server.task})
        assert server.task.cancelled()
        record = server.tunnel.record
        assert (record.status, record.flag, server.ends) == (GONE, "DOWNSTREAM_RESET", 1)
        assert str(record.error) == "stream reset by the peer: CANCEL"


async def test_a_peer_that_gives_up_before_the_target_is_connected(target: TcpServer) -> None:
    async with asked(to(target), at_once=CANCEL) as (server, stream):
        await server.ended()
        await asyncio.wait({server.task})
        await stream.peer.answered()
        assert (target.count, server.ends) == (0, 1)
        assert server.tunnel.record.status == GONE


async def test_an_open_tunnel_is_broken_off(target: TcpServer) -> None:
    async with asked(to(target)) as (server, stream):
        there = await target.accept()
        assert await stream.status() == 200
        error = StreamResetError("we stop", CANCEL)
        server.tunnel.abort(error)
        assert await there.was_reset()
        await stream.broken()
        server.tunnel.abort(error)
        assert (server.tunnel.record.error, server.ends) == (error, 1)


async def test_a_tunnel_that_is_being_connected_is_broken_off(target: TcpServer) -> None:
    ready = asyncio.Event()

    async def connect() -> Leg:
        leg = await to(target)()
        await ready.wait()
        return leg

    async with asked(connect) as (server, stream):
        there = await target.accept()
        server.tunnel.abort(DialError("we stop"))
        assert await stream.status() == 503
        ready.set()
        assert await there.was_reset(), "a target that comes too late is let go"
        assert (server.task.cancelled(), server.ends) == (False, 1)


async def test_a_cancelled_tunnel_is_recorded() -> None:
    async with asked(asyncio.Event().wait) as (server, stream):  # type: ignore[arg-type]  # never connects
        server.task.cancel()
        assert await stream.status() == 500
        assert server.ends == 1

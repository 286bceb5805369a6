"""The tunnel port's listener and its bound. `tests/shared/net/http2/test_first_bytes.py` has what comes
first, `test_app.py` the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from agent.tunnels import tunnel_port
from agent.tunnels.tunnel_port import TunnelPort
from shared.address import Address
from shared.errors import LimitError
from shared.http2 import frames
from shared.listen import bound_address, listen
from shared.net.http2.connection import Connection
from shared.net.legs.stream import Stream
from tests.shared.http2.dialogue import (
    LAST_OF_ALL,
    POST,
    PREFACE,
    goaway,
    goaway_seen,
    headers,
    settings,
)
from tests.support.http2_peer import Http2Peer
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, turned_away


class Told:
    """What the port tells."""

    def __init__(self, most_connections: int = 2) -> None:
        self.refusal: LimitError | None = None
        self.requests: list[Stream] = []
        self.connections: set[Connection] = set()
        self.refused: list[tuple[str, str]] = []
        self.changed = asyncio.Event()
        self.port = TunnelPort(
            most_connections=most_connections,
            idle_timeout_s=None,
            request=self.requests.append,
            opened=self.connections.add,
            lost=self._lost,
            turned_away=self._refused,
            refusal=lambda: self.refusal,
        )
        self.number = 0

    def _lost(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.changed.set()

    def _refused(self, peer: str, error: LimitError) -> None:
        self.refused.append((peer, str(error)))


@pytest.fixture
async def told() -> AsyncIterator[Told]:
    told = Told()
    told.number = (await told.port.open(Address("127.0.0.1", 0))).port
    yield told
    told.port.close()
    for connection in list(told.connections):
        connection.abort("the test is over")


async def test_requests_come_from_all_connections(told: Told) -> None:
    async with Http2Peer.connected(told.number) as one, Http2Peer.connected(told.number) as other:
        for peer in (one, other):
            peer.request(b"GET", b"/", end=True)
            await peer.answered()
        assert len(told.requests) == len(told.connections) == 2
    async with asyncio.timeout(PATIENCE_S):
        while told.connections:
            told.changed.clear()
            await told.changed.wait()


async def test_one_connection_too_many(told: Told) -> None:
    async with Http2Peer.connected(told.number) as peer, Http2Peer.connected(told.number) as other:
        for busy in (peer, other):
            busy.request(b"GET", b"/")
            await busy.answered()
        address = await turned_away(told.number)
        assert told.refused == [(address, "2 connections are open, which is HBONE_MAX_CONNECTIONS")]
        await other.close()
        async with Http2Peer.connected(told.number) as again:
            await again.answered()


async def test_a_connection_without_streams_leaves_for_a_new_one(
    told: Told, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that has been so for longest."""
    monkeypatch.setattr(tunnel_port, "EVICT_AFTER_S", 0.0)
    async with (
        Http2Peer.connected(told.number) as idle,
        Http2Peer.connected(told.number) as idler,
    ):
        for peer in (idle, idler):
            await peer.answered()
        idle.request(b"GET", b"/nobody")  # has one, so its time begins anew
        await idle.answered()
        async with Http2Peer.connected(told.number) as newcomer:
            stream = newcomer.request(b"GET", b"/", end=True)
            await newcomer.answered()
            await idler.until(lambda: idler.goaway)
            assert not (idle.goaway or newcomer.goaway)
            assert told.requests[-1].id == stream.number
            told.port.close()
    [line] = caplog.messages
    assert line.startswith("2 connections are open, which is HBONE_MAX_CONNECTIONS: 127.0.0.1:")
    assert line.endswith("without a stream for 0 s, is ended for a new one")


async def test_one_that_has_said_nothing_leaves_first(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel_port, "EVICT_AFTER_S", 0.0)
    async with Http2Peer.connected(told.number) as idle, TcpPeer.connected(told.number) as silent:
        await idle.answered()
        async with Http2Peer.connected(told.number) as newcomer:
            await newcomer.answered()
            with suppress(ConnectionResetError):
                assert await silent.rest() == b""
            await idle.answered()
            assert not idle.goaway


async def test_those_that_have_just_come_do_not_push_each_other_out(told: Told) -> None:
    async with TcpPeer.connected(told.number), TcpPeer.connected(told.number):
        await turned_away(told.number)
    assert [error for _, error in told.refused] == ["2 connections are open, which is HBONE_MAX_CONNECTIONS"]


async def test_while_too_much_is_held_no_connection_is_taken(told: Told) -> None:
    told.refusal = LimitError("too much is held", "HBONE_MAX_BUFFERED")
    address = await turned_away(told.number)
    assert told.refused == [(address, "too much is held")]
    told.refusal = None
    async with Http2Peer.connected(told.number) as peer:
        await peer.answered()


async def test_a_drain_serves_who_has_not_spoken_yet(told: Told) -> None:
    async with TcpPeer.connected(told.number) as silent:
        async with Http2Peer.connected(told.number) as peer:
            await peer.answered()
            await told.port.drain()
            assert len(told.connections) == 2
            with pytest.raises(ConnectionRefusedError):
                await TcpPeer.connect(told.number)
        assert (await silent.read(9))[3] == frames.SETTINGS
        await silent.send(PREFACE + settings() + headers(1, POST))
        async with asyncio.timeout(PATIENCE_S):
            while not told.requests:  # noqa: ASYNC110  # it has no event
                await asyncio.sleep(0)


async def test_the_end_of_listening_leaves_connections_alone(told: Told) -> None:
    async with Http2Peer.connected(told.number) as peer, TcpPeer.connected(told.number) as silent:
        await peer.answered()
        told.port.close()
        with suppress(ConnectionResetError):
            assert await silent.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            await TcpPeer.connect(told.number)
        await peer.answered()
        assert not peer.lost


async def test_a_line_for_http1_at_once_and_not_for_each(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = []
    for _ in range(3):
        async with TcpPeer.connected(told.number) as peer:
            await peer.send(b"GET / HTTP/1.1\r\n\r\n")
            assert (await peer.rest()).startswith(b"HTTP/1.1 505 ")
            addresses.append(peer.address)
    told.port.close()
    first = f"HTTP/1.1 from {addresses[0]} on the tunnel port: it accepts HTTP/2 "
    assert caplog.messages[0].startswith(first)
    assert "--use-http2" in caplog.messages[0] and "name: h2c" in caplog.messages[0]
    assert caplog.messages[1].startswith(f"HTTP/1.1 from {addresses[2]} ")
    assert caplog.messages[1].endswith(" (2 of these since the last line)")


async def test_who_waited_to_be_accepted_when_the_drain_began_is_drained_like_others(told: Told) -> None:
    await told.port.drain()
    listener = await listen(Address("127.0.0.1", 0), told.port._accept, purpose="test")
    async with listener, TcpPeer.connected(bound_address(listener).port) as client:
        await client.send(PREFACE + settings() + headers(1, POST))
        await client.read_until(goaway(LAST_OF_ALL))
        await client.send(goaway_seen())
        await client.read_until(goaway(1))
        assert len(told.requests) == len(told.connections) == 1, "what it asks for at once is served"

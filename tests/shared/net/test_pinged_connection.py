"""PING after silence, and the end of who does not answer, at both ends; the other end is the h2 library's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from shared.net.address import Address
from shared.net.connection import Connection
from shared.net.listen import bound_address, listen
from shared.net.pinged_connection import PingedConnection
from tests.support.http2_peer import Http2Peer
from tests.support.tcp_peer import PATIENCE_S, TcpPeer

INTERVAL_S = 0.05


class Ours:
    """Our connection, and when it is lost."""

    def __init__(self, interval_s: float, *, client: bool) -> None:
        self.over = asyncio.Event()
        self.connection = PingedConnection(interval_s, client=client, on_lost=self._lost)

    def _lost(self, connection: Connection) -> None:
        assert connection is self.connection
        self.over.set()

    async def lost(self) -> str:
        """Why it was lost."""
        async with asyncio.timeout(PATIENCE_S):
            await self.over.wait()
        return self.connection.cause


@asynccontextmanager
async def pair(
    *, client: bool, interval_s: float = INTERVAL_S, peer: Callable[[], asyncio.Protocol] | None = None
) -> AsyncIterator[tuple[Ours, Http2Peer]]:
    """Our connection as an accepted one, and its peer, which dialled."""
    ours = Ours(interval_s, client=client)
    server = await listen(Address("127.0.0.1", 0), lambda: ours.connection, purpose="test")
    _, other = await asyncio.get_running_loop().create_connection(
        lambda: Http2Peer(client=not client), "127.0.0.1", bound_address(server).port
    )
    try:
        await other.answered()
        yield ours, other
    finally:
        await other.close()
        await ours.lost()
        server.close()


@pytest.mark.parametrize("client", [True, False])
async def test_silence_is_broken_by_ping(client: bool) -> None:
    async with pair(client=client) as (ours, other):
        await other.until(lambda: other.pings >= 5)
        assert not ours.over.is_set()


@pytest.mark.parametrize("client", [True, False])
async def test_who_does_not_answer_is_dropped(client: bool) -> None:
    async with pair(client=client) as (ours, other):
        other.pause()
        assert await ours.lost() == f"{ours.connection.peer_name} has not answered PING within 0.05 s"
        assert not ours.connection.ended_in_order


async def test_who_has_never_said_anything_is_dropped() -> None:
    ours = Ours(INTERVAL_S, client=True)
    server = await listen(Address("127.0.0.1", 0), lambda: ours.connection, purpose="test")
    async with TcpPeer.connected(bound_address(server).port):
        assert "has not answered PING" in await ours.lost()
    server.close()


async def test_who_talks_is_not_asked() -> None:
    async with pair(client=False, interval_s=0.5) as (_, other):
        for _ in range(60):  # for more than two intervals
            await other.answered()
            await asyncio.sleep(0.02)
        assert other.pings == 0


async def test_an_end_in_order() -> None:
    async with pair(client=True, interval_s=PATIENCE_S) as (ours, other):
        ours.connection.drain()
        await other.until(lambda: other.lost)
        assert other.goaway
        assert await ours.lost() == ""
        assert ours.connection.ended_in_order


async def test_the_peers_goaway_is_an_end_in_order() -> None:
    async with pair(client=False, interval_s=PATIENCE_S) as (ours, other):
        other.say_goaway(0)
        await other.answered()
        await other.close()
        await ours.lost()
        assert ours.connection.ended_in_order


async def test_an_end_without_a_word_is_none() -> None:
    async with pair(client=True, interval_s=PATIENCE_S) as (ours, other):
        other.drop()
        await ours.lost()
        assert not ours.connection.ended_in_order


async def test_goodbye_ends_nothing() -> None:
    async with pair(client=True, interval_s=PATIENCE_S) as (ours, other):
        ours.connection.say_goodbye()
        await other.until(lambda: other.goaway)
        await other.answered()
        assert ours.connection.room > 0
        assert ours.connection.usable

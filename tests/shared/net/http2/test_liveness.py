"""PING after silence, and the end of a peer that does not answer, at both ends of a connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from shared.address import Address
from shared.http2 import frames
from shared.listen import bound_address, listen
from shared.net.http2.connection import Connection
from shared.net.http2.liveness import LATE_S, Keepalive, Liveness, Verdict, When, while_connected
from tests.shared.net.hasty_loop import HastyLoop, hasty
from tests.shared.net.in_memory import Wire
from tests.support.clocks import ROUNDING_S
from tests.support.http2_peer import Http2Peer
from tests.support.tcp_peer import PATIENCE_S, TcpPeer

INTERVAL_S = 0.05

WIDE_OPEN = (
    frames.header(6, frames.SETTINGS, 0, 0)
    + frames.SETTING_INITIAL_WINDOW_SIZE.to_bytes(2, "big")
    + (1 << 30).to_bytes(4, "big")
    + frames.window_update(0, 1 << 30)
)
"""What a server says that takes a gigabyte ahead."""

UPLOAD_BYTES = 4 << 20
STEP_BYTES = 1 << 20

LONG_S = 5.0
"""An interval on the hasty loop, where it takes no time."""

SLACK_S = 0.5
"""What a busy machine may add to it."""


class Ours:
    """Our connection, and when it is lost."""

    def __init__(self, interval_s: float, *, client: bool) -> None:
        self.over = asyncio.Event()
        self.connection = Connection(client=client, keepalive=while_connected(interval_s), on_lost=self._lost)

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


async def test_goaway_ends_nothing() -> None:
    async with pair(client=True, interval_s=PATIENCE_S) as (ours, other):
        ours.connection.say_goaway()
        await other.until(lambda: other.goaway)
        await other.answered()
        assert ours.connection.room > 0
        assert ours.connection.usable


# When it asks, and when it gives up.


def checks(liveness: Liveness, *times: tuple[float, float]) -> list[Verdict]:
    """What is said at each time, with when the peer was last heard; its transport is closed."""
    return [liveness.check(now, heard_at, Wire()) for now, heard_at in times]


def test_a_silent_peer_is_asked_and_given_up() -> None:
    liveness = Liveness(Keepalive(When.ALWAYS, 60.0, 15.0), 100.0)
    assert liveness.begin(101.0, 0.0)
    assert liveness.due == 160.0
    assert checks(liveness, (160.0, 120.0)) == [Verdict.WAIT]
    assert liveness.due == 180.0
    assert checks(liveness, (180.0, 120.0)) == [Verdict.ASK]
    assert liveness.due == 195.0
    assert checks(liveness, (195.0, 120.0)) == [Verdict.GIVE_UP]


def test_any_byte_is_an_answer() -> None:
    liveness = Liveness(Keepalive(When.STREAMS, 60.0, 15.0), 0.0)
    liveness.begin(0.0, 0.0)
    assert checks(liveness, (60.0, 0.0), (75.0, 74.0)) == [Verdict.ASK, Verdict.WAIT]
    assert liveness.due == 134.0


def test_a_late_timer_is_our_fault_once() -> None:
    liveness = Liveness(Keepalive(When.STREAMS, 60.0, 15.0), 0.0)
    liveness.begin(0.0, 0.0)
    late = 75.0 + LATE_S + 0.1
    assert checks(liveness, (60.0, 0.0), (late, 0.0)) == [Verdict.ASK, Verdict.WAIT]
    assert checks(liveness, (late + 15.0, 0.0)) == [Verdict.GIVE_UP]


def test_silence_counts_from_where_the_peer_is_needed() -> None:
    stalled = Liveness(Keepalive(When.STALLED, 40.0, 20.0), 0.0)
    assert stalled.begin(1000.0, 0.0)
    assert stalled.due == 1040.0
    streams = Liveness(Keepalive(When.STREAMS, 60.0, 15.0), 0.0)
    assert streams.begin(1000.0, 5.0)
    assert checks(streams, (1000.0, 5.0)) == [Verdict.ASK], "at once, for it has been silent so long"


def test_no_interval_is_no_watch() -> None:
    assert not Liveness(while_connected(0.0), 0.0).begin(0.0, 0.0)


# The same, by a clock that jumps.


@hasty
async def test_it_asks_after_one_interval_of_silence_and_gives_up_after_two() -> None:
    loop = asyncio.get_running_loop()
    async with pair(client=True, interval_s=LONG_S) as (ours, other):
        await asyncio.sleep(LONG_S - SLACK_S)
        await other.answered()  # so the silence begins anew
        heard_at = loop.time()
        await asyncio.sleep(LONG_S - SLACK_S)
        assert other.pings == 0
        await asyncio.sleep(2 * SLACK_S)
        assert other.pings == 1
        assert LONG_S - ROUNDING_S < ours.connection.heard_at - heard_at < LONG_S + 2 * SLACK_S

        heard_at = ours.connection.heard_at
        other.pause()
        await ours.lost()
        assert 2 * LONG_S - ROUNDING_S < loop.time() - heard_at < 2 * LONG_S + 2 * SLACK_S
        assert ours.connection.unanswered_s == 2 * LONG_S


@hasty
async def test_when_we_were_held_up_the_peer_is_not_to_blame() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, HastyLoop)
    async with pair(client=True, interval_s=LONG_S) as (ours, other):
        ask = ours.connection.ping
        ours.connection.ping = lambda: (ask(), loop.hold_up(2 * LONG_S))[0]  # type: ignore[method-assign]
        await other.until(lambda: other.pings == 1)
        await asyncio.sleep(0.5 * LONG_S)
        assert not ours.over.is_set()
        ours.connection.ping = ask  # type: ignore[method-assign]
        other.pause()
        await ours.lost()


@hasty
async def test_a_ping_behind_an_upload_that_gets_on_is_waited_for() -> None:
    """A slow line: the PING waits in the kernel behind bytes that take minutes, and nothing comes back."""
    loop = asyncio.get_running_loop()
    ours = Ours(LONG_S, client=True)
    server = await listen(Address("127.0.0.1", 0), lambda: ours.connection, purpose="test")
    with socket.socket() as far:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)  # loopback's own would move in leaps
        far.setblocking(False)
        await loop.sock_connect(far, ("127.0.0.1", bound_address(server).port))
        await loop.sock_sendall(far, WIDE_OPEN)
        await loop.sock_recv(far, 1 << 10)
        stream = ours.connection.open([(b":method", b"POST"), (b":path", b"/"), (b":scheme", b"http")])
        stream.write(bytes(UPLOAD_BYTES))
        taken = 0
        while taken < UPLOAD_BYTES // 2:
            await asyncio.sleep(LONG_S - SLACK_S)
            taken += len(await loop.sock_recv(far, STEP_BYTES))
            assert not ours.over.is_set(), f"given up after {taken} bytes"
        stopped_at = loop.time()
        assert "has not answered PING" in await ours.lost()
        assert loop.time() - stopped_at < 5 * LONG_S
    server.close()

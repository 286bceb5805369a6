"""Small writes to a peer that does not read: kept in one piece, in order, by each leg on a TCP transport."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from shared.net.legs.small_writes import (
    MARK_BYTES,
    SMALL_BYTES,
    UNSENT_BYTES,
)
from shared.net.legs.tcp import TcpLeg
from tests.shared.net.in_memory import Seen, Wire
from tests.shared.net.loopback import until

PIECE = b"0123456789"


# A leg on it.


def leg_on(wire: Wire) -> tuple[TcpLeg, Seen]:
    leg, seen = TcpLeg(), Seen()
    leg.connection_made(wire)
    leg.join(seen)
    return leg, seen


def test_only_what_is_small_and_comes_behind_something_is_kept() -> None:
    wire = Wire()
    leg, _ = leg_on(wire)
    wire.unsent = UNSENT_BYTES
    leg.write(PIECE)
    wire.unsent = UNSENT_BYTES + 1
    leg.write(bytes(SMALL_BYTES))
    assert wire.writes == [PIECE, bytes(SMALL_BYTES)]
    leg.write(bytes(SMALL_BYTES - 1))
    assert len(wire.writes) == 2


def test_a_leg_keeps_small_pieces_until_the_transport_has_sent_what_it_has() -> None:
    wire = Wire()
    leg, seen = leg_on(wire)
    wire.unsent = UNSENT_BYTES + 1
    for _ in range(100):
        leg.write(PIECE)
    leg.pause_writing()  # as a transport says when its mark is lowered
    assert (wire.writes, seen.story) == ([], [])
    assert leg.buffered_bytes == UNSENT_BYTES + 1 + 100 * len(PIECE)
    assert wire.marks == (0, None)
    leg.write(bytes(SMALL_BYTES))
    assert wire.writes == [], "what is large waits behind what is small, too"
    wire.unsent = 0
    leg.resume_writing()
    assert wire.writes == [100 * PIECE + bytes(SMALL_BYTES)]
    assert wire.marks == (None, None)
    leg.write(PIECE)
    assert wire.writes[1:] == [PIECE]


def test_a_leg_that_keeps_much_is_full() -> None:
    wire = Wire()
    leg, seen = leg_on(wire)
    wire.unsent = UNSENT_BYTES + 1
    for _ in range(MARK_BYTES // len(PIECE)):
        leg.write(PIECE)
    assert seen.story == ["full"]
    wire.full = leg.pause_writing  # what it kept fills the transport
    wire.unsent = MARK_BYTES + 1
    leg.resume_writing()
    assert seen.story == ["full", "full"]
    wire.unsent = 0
    leg.resume_writing()
    assert seen.story == ["full", "full", "drained"]


@pytest.mark.parametrize("end", ["write_eof", "close"])
async def test_an_end_comes_after_what_is_kept(end: str) -> None:
    wire = Wire()
    leg, _ = leg_on(wire)
    wire.unsent = UNSENT_BYTES + 1
    leg.write(PIECE)
    getattr(leg, end)()
    assert (wire.writes, wire.ended) == ([PIECE], True)
    leg.connection_lost(None)


def test_what_is_kept_is_dropped_with_the_connection() -> None:
    wire = Wire()
    leg, seen = leg_on(wire)
    wire.unsent = UNSENT_BYTES + 1
    leg.write(PIECE)
    wire.unsent = 0
    leg.connection_lost(None)
    assert leg.buffered_bytes == 0
    assert seen.story == ["failed: connection reset: closed by the peer"]


# Against the kernel.


@pytest.fixture
async def stalled() -> AsyncIterator[tuple[TcpLeg, socket.socket]]:
    """A leg, and its peer that does not read."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        loop = asyncio.get_running_loop()
        _, leg = await loop.create_connection(TcpLeg, "127.0.0.1", server.getsockname()[1])
        peer, _ = server.accept()
        with peer:
            peer.setblocking(False)
            leg.join(Seen())
            yield leg, peer
            leg.abort()


async def test_every_byte_arrives_in_order(stalled: tuple[TcpLeg, socket.socket]) -> None:
    leg, peer = stalled
    sent = bytearray()
    while leg.buffered_bytes < 2 * UNSENT_BYTES:
        leg.write(bytes(SMALL_BYTES))
        sent += bytes(SMALL_BYTES)
        await asyncio.sleep(0)
    for number in range(20_000):
        piece = b"%d," % number
        leg.write(piece)
        sent += piece
        if number % 100 == 0:
            await asyncio.sleep(0)
    leg.write_eof()
    received = bytearray()
    loop = asyncio.get_running_loop()
    while data := await asyncio.wait_for(loop.sock_recv(peer, 1 << 20), 20):
        received += data
    assert received == sent
    await until(lambda: leg.buffered_bytes == 0)

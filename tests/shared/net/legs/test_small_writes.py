"""Small writes to a peer that does not read: kept in one piece, in order, by each leg on a TCP transport."""

from __future__ import annotations

import asyncio

import pytest

from shared.net.legs.small_writes import (
    MARK_BYTES,
    SMALL_BYTES,
    UNSENT_BYTES,
)
from shared.net.legs.tcp import TcpLeg
from tests.shared.net.in_memory import joined, on_a_wire
from tests.shared.net.loopback import FIN, Peer, until

PIECE = b"0123456789"


def test_only_what_is_small_and_comes_behind_something_is_kept() -> None:
    leg, wire, _ = on_a_wire()
    wire.unsent = UNSENT_BYTES
    leg.write(PIECE)
    wire.unsent = UNSENT_BYTES + 1
    leg.write(bytes(SMALL_BYTES))
    assert wire.writes == [PIECE, bytes(SMALL_BYTES)]
    leg.write(bytes(SMALL_BYTES - 1))
    assert len(wire.writes) == 2


def test_a_leg_keeps_small_pieces_until_the_transport_has_sent_what_it_has() -> None:
    leg, wire, seen = on_a_wire()
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
    leg, wire, seen = on_a_wire()
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
    leg, wire, _ = on_a_wire()
    wire.unsent = UNSENT_BYTES + 1
    leg.write(PIECE)
    getattr(leg, end)()
    assert (wire.writes, wire.ended) == ([PIECE], True)
    leg.connection_lost(None)


def test_what_is_kept_is_dropped_with_the_connection() -> None:
    leg, wire, seen = on_a_wire()
    wire.unsent = UNSENT_BYTES + 1
    leg.write(PIECE)
    wire.unsent = 0
    leg.connection_lost(None)
    assert leg.buffered_bytes == 0
    assert seen.story == ["failed: connection reset: closed by the peer"]


# Against the kernel.


async def test_every_byte_arrives_in_order(leg: TcpLeg, peer: Peer) -> None:
    joined(leg)
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
    assert await peer.ended() == FIN
    assert peer.received == sent
    await until(lambda: leg.buffered_bytes == 0)

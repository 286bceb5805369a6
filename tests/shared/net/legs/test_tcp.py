"""The TCP leg on real sockets, a bare one at the other end."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import pytest

from shared.errors import HboneError, StreamResetError
from shared.net.legs.contract import Buffer, Leg
from shared.net.legs.read_buffer import BULK_READ_BYTES, READ_BYTES
from shared.net.legs.tcp import (
    BULK_READS,
    EARLY_BYTES,
    TcpLeg,
    address_text,
)
from shared.tasks import spawn
from tests.shared.net.hasty_loop import hasty
from tests.shared.net.in_memory import Seen, joined, on_a_wire
from tests.shared.net.loopback import FIN, PATIENCE_S, RST, UNREAD_MIB, Peer, dialled, turns, until
from tests.support.few_files import most_open_files

MIB = 1 << 20


# What it pushes.


async def test_bytes_and_end(leg: TcpLeg, peer: Peer) -> None:
    seen = joined(leg)
    await peer.send(b"hello")
    await until(lambda: seen.story == [b"hello"])
    peer.fin()
    await until(lambda: seen.story == [b"hello", "ended"])
    leg.write(b"still here")
    assert await peer.read(10) == b"still here"


async def test_a_leg_that_was_left_keeps_what_comes_for_the_next(leg: TcpLeg, peer: Peer) -> None:
    """Though a bulk of bytes came before, which are read in large pieces."""

    class Leaves(Seen):
        def received(self, leg: Leg, data: Buffer) -> None:
            assert isinstance(leg, TcpLeg)
            leg.leave(bytes(data))

    body = bytes(range(256)) * 4096
    leg.join(Leaves())
    sending = spawn(peer.send(body), name="send")
    await until(lambda: leg.early_bytes >= EARLY_BYTES)
    seen = joined(leg)
    await until(lambda: seen.story == [body])
    await sending


async def test_reset(leg: TcpLeg, peer: Peer) -> None:
    seen = joined(leg)
    await peer.rst()
    await until(lambda: bool(seen.story))
    assert seen.story == ["failed: connection reset: [Errno 104] Connection reset by peer"]


async def test_reset_after_the_end(leg: TcpLeg, peer: Peer) -> None:
    seen = joined(leg)
    peer.fin()
    await until(lambda: seen.story == ["ended"])
    await peer.rst()
    leg.write(b"a socket that only writes hears of it when it does")
    await until(lambda: len(seen.story) == 2)
    assert str(seen.story[1]).startswith("failed: connection reset: ")


async def test_what_came_before_a_reset_can_be_had(leg: TcpLeg, peer: Peer) -> None:
    words: list[bytes] = []

    class Curious(Seen):
        def failed(self, leg: Leg, error: HboneError) -> None:
            words.append(cast("TcpLeg", leg).unread())
            super().failed(leg, error)

    seen = Curious()
    leg.join(seen)
    leg.pause_reading()
    await peer.send(b"last words")
    await peer.rst()
    leg.write(b"x")
    await until(lambda: bool(seen.story))
    assert words == [b"last words"]


async def test_a_relay_that_closes_upon_the_last_words(leg: TcpLeg, peer: Peer) -> None:
    """They are read once a write has failed, in the transport's last call."""

    class Hasty(Seen):
        def received(self, leg: Leg, data: Buffer) -> None:
            super().received(leg, data)
            leg.close()

    seen = Hasty()
    leg.join(seen)
    leg.pause_reading()
    await peer.send(b"all")
    peer.fin()
    await peer.rst()
    leg.write(b"x")
    await until(lambda: bool(seen.story))
    assert seen.story[0] == b"all"


async def test_how_much_the_kernel_keeps_can_be_bounded() -> None:
    async with dialled() as (leg, peer), dialled() as (other, _):
        leg.keep_little(64 << 10)
        sock = leg._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 128 << 10, "socket(7): doubled"
        for one in (leg, other):
            joined(one)
            one.write(bytes(UNREAD_MIB * MIB))
        assert leg.unsent_bytes >= UNREAD_MIB * MIB - (8 << 20)
        await peer.rst()
        leg.abort()
        assert leg.unsent_bytes == 0


async def test_a_reset_before_join(leg: TcpLeg, peer: Peer) -> None:
    await peer.send(b"early")
    await until(lambda: leg.early_bytes > 0)
    await peer.rst()
    await until(lambda: leg._error is not None)
    assert joined(leg).story == [b"early", f"failed: {leg._error}"]


async def test_an_end_and_a_reset_before_join(leg: TcpLeg, peer: Peer) -> None:
    """Both are told: who has ended before breaking has delivered everything."""
    await peer.send(b"all of it")
    peer.fin()
    await until(lambda: leg._ended)
    await peer.rst()
    leg.write(b"to hear of it")
    await until(lambda: leg._error is not None)
    assert joined(leg).story == [b"all of it", "ended", f"failed: {leg._error}"]


async def test_what_is_kept_before_join_is_bounded(leg: TcpLeg, peer: Peer) -> None:
    peer.send_soon(bytes(UNREAD_MIB * MIB))
    await until(lambda: leg.early_bytes >= EARLY_BYTES)
    await turns(50)
    assert leg.early_bytes < EARLY_BYTES + READ_BYTES
    assert peer.is_sending
    seen = joined(leg)
    await peer.all_sent()
    peer.fin()
    await until(lambda: seen.story[-1] == "ended")
    assert seen.story == [bytes(UNREAD_MIB * MIB), "ended"]


async def test_a_relay_that_is_full_at_once(leg: TcpLeg, peer: Peer) -> None:
    class Full(Seen):
        def received(self, _: object, data: object) -> None:
            super().received(leg, data)  # type: ignore[arg-type]  # a view, as ever
            leg.pause_reading()

    await peer.send(bytes(EARLY_BYTES))
    await until(lambda: leg.early_bytes >= EARLY_BYTES)
    seen = Full()
    leg.join(seen)
    await peer.send(b"x")
    await turns(50)
    assert seen.story == [bytes(EARLY_BYTES)]
    leg.resume_reading()
    await until(lambda: seen.story == [bytes(EARLY_BYTES) + b"x"])


async def test_pause_and_resume(leg: TcpLeg, peer: Peer) -> None:
    seen = joined(leg)
    leg.pause_reading()
    leg.pause_reading()
    peer.send_soon(bytes(UNREAD_MIB * MIB))
    await turns(50)
    assert seen.story == []
    assert peer.is_sending
    leg.resume_reading()
    leg.resume_reading()
    await peer.all_sent()
    await until(lambda: seen.story == [bytes(UNREAD_MIB * MIB)])


# Large reads.


def read(leg: TcpLeg, data: bytes) -> None:
    """A read: `data`, of which as much as there is room for."""
    buffer = leg.get_buffer(-1)
    size = min(len(data), len(buffer))
    buffer[:size] = data[:size]
    leg.buffer_updated(size)


BULK = bytes(range(250)) * (BULK_READ_BYTES // 250)


async def test_after_a_full_read_comes_a_large_one() -> None:
    leg, _, seen = on_a_wire()
    assert len(leg.get_buffer(-1)) == READ_BYTES
    read(leg, BULK)
    assert len(leg.get_buffer(-1)) == BULK_READ_BYTES
    read(leg, BULK)
    assert len(leg.get_buffer(-1)) == BULK_READ_BYTES
    read(leg, b"little")
    assert len(leg.get_buffer(-1)) == READ_BYTES
    assert seen.story == [BULK[:READ_BYTES] + BULK + b"little"]


async def test_what_the_far_side_does_not_take_is_no_large_read() -> None:
    """A stalled tunnel holds what was read last."""
    leg, _, seen = on_a_wire()
    received = seen.received

    def full(leg_: Leg, data: bytes | bytearray | memoryview) -> None:
        received(leg, data)
        leg.pause_reading()

    seen.received = full  # type: ignore[assignment,method-assign]
    for _ in range(3):
        read(leg, BULK)
        assert len(leg.get_buffer(-1)) == READ_BYTES
        leg.resume_reading()


async def test_large_reads_give_way_to_others() -> None:
    leg, wire, _ = on_a_wire()
    wire.reading.clear()
    for _ in range(2 * (BULK_READS + 1)):
        read(leg, BULK)
        if wire.reading:
            break
    assert wire.reading == ["paused"]
    await asyncio.sleep(0)
    assert wire.reading == ["paused", "resumed"]
    for _ in range(3 * BULK_READS):  # not in one turn: each fills its buffer, but not to the end
        read(leg, BULK[:-1])
    assert wire.reading == ["paused", "resumed"]


async def test_who_gives_way_and_is_paused_stays_paused() -> None:
    leg, wire, _ = on_a_wire()
    while "paused" not in wire.reading:
        read(leg, BULK)
    leg.pause_reading()
    await asyncio.sleep(0)
    assert "resumed" not in wire.reading
    leg.resume_reading()
    assert wire.reading[-1] == "resumed"


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_who_gives_way_and_is_closed_reads_no_more(how: str) -> None:
    leg, wire, _ = on_a_wire()
    while "paused" not in wire.reading:
        read(leg, BULK)
    leg.eof_received()
    getattr(leg, how)()
    await asyncio.sleep(0)
    assert "resumed" not in wire.reading
    leg.connection_lost(None)


# What it sends.


async def test_full_and_drained(leg: TcpLeg, peer: Peer) -> None:
    seen = joined(leg)
    leg.write(bytes(UNREAD_MIB * MIB))
    assert seen.story == ["full"]
    leg.write_eof()
    assert await peer.ended() == FIN
    assert len(peer.received) == UNREAD_MIB * MIB
    assert seen.story == ["full", "drained"]


async def test_join_of_a_leg_that_is_full() -> None:
    async with dialled() as (leg, _):
        leg.write(bytes(UNREAD_MIB * MIB))
        assert joined(leg).story == ["full"]


async def test_no_reference_to_a_view_is_kept(leg: TcpLeg, peer: Peer) -> None:
    buffer = bytearray(b"x" * UNREAD_MIB * MIB)
    leg.write(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    leg.write_eof()
    assert await peer.ended() == FIN
    assert peer.received == b"x" * UNREAD_MIB * MIB


# Letting go.


async def test_abort_is_a_reset(leg: TcpLeg, peer: Peer) -> None:
    joined(leg)
    leg.write(bytes(UNREAD_MIB * MIB))
    leg.abort()
    assert await peer.ended() == RST
    assert len(peer.received) < UNREAD_MIB * MIB


@hasty
async def test_a_watch_ends_with_the_connection(leg: TcpLeg, peer: Peer) -> None:
    leg.write(bytes(UNREAD_MIB * MIB))
    leg.close()
    assert leg._closing is not None
    timer = leg._closing._timer
    await peer.rst()
    await until(lambda: timer is not None and timer.cancelled())


@pytest.mark.parametrize("how", ["closed", "aborted", "reset by the peer"])
async def test_nothing_raises_on_a_leg_that_is_gone(how: str, leg: TcpLeg, peer: Peer) -> None:
    seen = joined(leg)
    if how == "closed":
        leg.close()
    elif how == "aborted":
        leg.abort()
    else:
        await peer.rst()
        await until(lambda: bool(seen.story))
    told = list(seen.story)
    for _ in range(2):
        leg.write(b"x")
        leg.write_eof()
        leg.pause_reading()
        leg.resume_reading()
        leg.close()
        leg.abort()
        await asyncio.sleep(0)
    assert seen.story == told


@pytest.mark.parametrize("method", ["write_eof", "pause_reading", "resume_reading", "close", "abort"])
async def test_nothing_raises_between_a_failed_write_and_the_news_of_it(
    method: str, leg: TcpLeg, peer: Peer
) -> None:
    seen = joined(leg)
    leg.pause_reading()
    await peer.rst()
    leg.write(b"to nobody")
    leg.write(b"still nobody")
    getattr(leg, method)()
    await turns(20)
    assert len(seen.story) <= 1


# Giving away.


async def test_release_gives_the_transport_away(leg: TcpLeg, peer: Peer) -> None:
    transport = leg.release()
    leg.write(b"not sent")
    leg.close()
    leg.abort()
    transport.write(b"sent")
    transport.close()
    assert await peer.ended() == FIN
    assert peer.received == b"sent"


async def test_detach_gives_the_bare_socket_away(leg: TcpLeg, peer: Peer) -> None:
    await peer.send(b"early")
    await until(lambda: leg.early_bytes > 0)
    sock, early = leg.detach()
    with sock:
        assert (bytes(early), sock.gettimeout()) == (b"early", 0.0)
        await turns(3)  # the transport is gone by then, and the peer has heard nothing of it
        assert leg._transport.is_closing()
        await peer.send(b"late")
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(sock, b"still here"), PATIENCE_S)
        assert await peer.read(10) == b"still here"
        assert sock.recv(100) == b"late"
        peer.fin()
        assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
    assert await peer.ended() == FIN


async def test_detach_of_a_connection_that_has_broken(leg: TcpLeg, peer: Peer) -> None:
    """Its socket would tell of an end: the transport has used the error up."""
    await peer.rst()
    await until(leg._transport.is_closing)
    with pytest.raises(StreamResetError, match="connection reset"):
        leg.detach()


async def test_detach_without_a_descriptor_leaves_the_leg_as_it_was(leg: TcpLeg, peer: Peer) -> None:
    await peer.send(b"early")
    await until(lambda: leg.early_bytes > 0)
    with most_open_files(1), pytest.raises(OSError, match="Too many open files"):
        leg.detach()
    assert joined(leg).story == [b"early"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (("192.0.2.1", 80), "192.0.2.1:80"),
        (("2001:db8::1", 443, 0, 0), "[2001:db8::1]:443"),
        ("/run/socket", "/run/socket"),
        ("", "unknown"),
        (None, "unknown"),
        ((), "unknown"),
    ],
)
def test_address_text(name: object, text: str) -> None:
    assert address_text(name) == text

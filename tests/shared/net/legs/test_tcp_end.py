"""How TCP connections end: a leg on a real socket, a bare one at the other end, the kernel between them."""

from __future__ import annotations

import asyncio
import socket

import pytest

from shared.net.legs.read_buffer import READ_BYTES
from shared.net.legs.tcp import TcpLeg
from shared.net.legs.tcp_end import (
    FIN_ON_CLOSE,
    LAST_BYTES_TIMEOUT_S,
    LINGER_S,
    LONGEST_LOOK_S,
    RESET_ON_CLOSE,
    acknowledged_bytes,
    close_if_taken,
    last_bytes_left,
    reset,
    unsent_bytes,
)
from tests.shared.net.hasty_loop import hasty
from tests.shared.net.in_memory import joined
from tests.shared.net.loopback import FIN, PATIENCE_S, RST, UNREAD_MIB, Peer, dialled, turns, until

MIB = 1 << 20


# The last bytes.


@hasty
async def test_a_peer_that_does_not_read_is_reset_in_the_end(leg: TcpLeg, peer: Peer) -> None:
    """Not ended with FIN, which would make what it got look like the whole."""
    joined(leg)
    leg.write(bytes(UNREAD_MIB * MIB))
    leg.close()
    await asyncio.sleep(LAST_BYTES_TIMEOUT_S - 1)
    assert leg._transport.get_write_buffer_size() > 0
    await asyncio.sleep(2 * LONGEST_LOOK_S)
    peer.start_reading()
    await turns(1000)
    assert peer.end == RST


@pytest.mark.parametrize("unread", [0, 100_000])
async def test_close_over_unread_bytes_destroys_nothing(unread: int, leg: TcpLeg, peer: Peer) -> None:
    """The kernel would send RST, and drop what the peer has yet to take (RFC 9112 section 9.6)."""
    joined(leg)
    leg.pause_reading()
    await peer.send(bytes(unread))
    leg.write(bytes(UNREAD_MIB * MIB))
    leg.close()
    peer.send_soon(bytes(UNREAD_MIB * MIB))
    assert await peer.ended() == FIN
    assert len(peer.received) == UNREAD_MIB * MIB
    await peer.all_sent()
    peer.fin()
    await until(lambda: leg._transport.is_closing())


@hasty
async def test_a_peer_that_has_everything_and_goes_on_is_not_waited_for_for_ever(
    leg: TcpLeg, peer: Peer
) -> None:
    joined(leg)
    leg.write(b"all")
    leg.close()
    assert await peer.ended() == FIN
    await peer.send(b"nobody reads this")
    await asyncio.sleep(LINGER_S - 1)
    assert not leg._transport.is_closing()
    await asyncio.sleep(LINGER_S)
    assert leg._transport.is_closing()


@hasty
async def test_a_closed_leg_finds_out_that_its_peer_is_gone(leg: TcpLeg, peer: Peer) -> None:
    """Its transport neither reads nor writes, so nobody tells it."""
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
    joined(leg)
    peer.fin()
    await until(lambda: leg._ended)
    leg.write(bytes(4 * READ_BYTES))
    await turns(50)
    assert leg._transport.get_write_buffer_size() == 0
    leg.close()
    assert not leg._transport.is_closing(), "more than is left to the kernel alone"
    await peer.rst()
    await asyncio.sleep(2 * LONGEST_LOOK_S)
    assert leg._transport.is_closing()


@hasty
async def test_a_reader_of_1_kib_a_second_gets_everything(leg: TcpLeg, peer: Peer) -> None:
    """4 MiB and FIN, 70 minutes long; both directions have ended, so nothing but the last bytes is left."""
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
    joined(leg)
    peer.fin()
    await until(lambda: leg._ended)
    leg.write(bytes(4 * MIB))
    leg.write_eof()
    leg.close()
    received = 0
    while data := await _some(peer, READ_BYTES):
        received += len(data)
        await asyncio.sleep(len(data) / 1024)
    assert received == 4 * MIB


async def _some(peer: Peer, count: int) -> bytes:
    async with asyncio.timeout(3600):
        return await asyncio.get_running_loop().sock_recv(peer.sock, count)


# The quick end, of a peer that has ended too.


def lingers(leg: TcpLeg) -> bytes:
    sock = leg._transport.get_extra_info("socket")
    return bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, len(RESET_ON_CLOSE)))


async def test_close_alone_says_fin_and_loses_nothing(leg: TcpLeg, peer: Peer) -> None:
    joined(leg)
    peer.fin()
    await until(lambda: leg._ended)
    leg.write(b"all")
    leg.close()
    assert leg._transport.is_closing()
    assert lingers(leg) == FIN_ON_CLOSE
    assert await peer.ended() == FIN
    assert peer.received == b"all"


async def test_once_both_ends_were_taken_the_kernel_is_told_nothing_more(leg: TcpLeg, peer: Peer) -> None:
    joined(leg)
    leg.write_eof()
    assert await peer.ended() == FIN
    peer.fin()
    await until(lambda: leg._ended)
    leg.close()
    assert leg._transport.is_closing()
    assert lingers(leg) == RESET_ON_CLOSE, "which has nobody left to reset"


async def test_what_is_not_taken_is_not_left_to_the_kernel(leg: TcpLeg, peer: Peer) -> None:
    joined(leg)
    peer.fin()
    await until(lambda: leg._ended)
    leg.write(bytes(UNREAD_MIB * MIB))
    assert not close_if_taken(leg._transport, leg._sock)
    assert not leg._transport.is_closing()
    assert lingers(leg) == RESET_ON_CLOSE
    leg.abort()


# What the peer said before it broke off.


@pytest.mark.parametrize("size", [0, 1, 100_000])
async def test_a_failed_write_loses_nothing_that_came_before_fin(size: int, leg: TcpLeg, peer: Peer) -> None:
    """A server that answers in full and closes while the client still talks; the answer is read slowly."""
    seen = joined(leg)
    leg.pause_reading()
    await peer.send(bytes(size))
    peer.fin()
    await peer.rst()
    for _ in range(2):
        leg.write(b"one thing more")
    await until(lambda: leg._error is not None)
    answer: list[object] = [bytes(size)] if size else [bytearray()]
    assert seen.story == [*answer, "ended", "failed: connection reset: [Errno 32] Broken pipe"]


async def test_a_failed_write_makes_no_end_of_a_reset(leg: TcpLeg, peer: Peer) -> None:
    seen = joined(leg)
    leg.pause_reading()
    await peer.send(bytes(100_000))
    await peer.rst()
    for _ in range(2):
        leg.write(b"one thing more")
    await until(lambda: bool(seen.story))
    assert seen.story == ["failed: connection reset: [Errno 104] Connection reset by peer"]


async def test_a_failed_write_before_join(leg: TcpLeg, peer: Peer) -> None:
    leg.pause_reading()
    await peer.send(b"all of it")
    peer.fin()
    await peer.rst()
    for _ in range(2):
        leg.write(b"one thing more")
    await until(lambda: leg._error is not None)
    assert joined(leg).story == [b"all of it", "ended", f"failed: {leg._error}"]


# What the kernel says for a process that is no more.


@pytest.mark.parametrize(("in_a_tunnel", "end"), [(False, FIN), (True, RST)])
async def test_a_socket_that_is_just_closed(in_a_tunnel: bool, end: str, leg: TcpLeg, peer: Peer) -> None:
    """As the kernel closes those of a process that is killed: FIN would make a part look like the whole."""
    if in_a_tunnel:
        joined(leg)
    leg.write(b"there would be more")
    await peer.read(19)
    leg._transport.abort()
    assert await peer.ended() == end


async def test_the_end_of_a_process_can_wait_for_last_bytes(leg: TcpLeg, peer: Peer) -> None:
    joined(leg)
    peer.fin()
    await until(lambda: leg._ended)
    leg.write(bytes(UNREAD_MIB * MIB))
    leg.close()
    left = last_bytes_left()
    await asyncio.sleep(0)
    assert not left.is_set()
    assert await peer.ended() == FIN
    async with asyncio.timeout(PATIENCE_S):
        await left.wait()
    assert last_bytes_left().is_set()


# The kernel's part.


async def test_reset_of_a_connection_that_has_gone(leg: TcpLeg, peer: Peer) -> None:
    await peer.rst()
    await until(lambda: leg._error is not None)
    reset(leg._transport)


async def test_what_the_peer_s_kernel_has_taken_is_counted() -> None:
    async with dialled() as (leg, _):
        transport = leg._transport
        before = acknowledged_bytes(transport)
        assert before is not None
        leg.write(bytes(1000))
        await until(lambda: unsent_bytes(transport) == 0)
        assert acknowledged_bytes(transport) == before + 1000
        leg.abort()
        await until(lambda: acknowledged_bytes(transport) is None)

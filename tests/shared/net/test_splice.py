from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import struct
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from shared.errors import LifetimeError
from shared.net import splice
from shared.net.splice import SpliceRelay
from shared.tasks import spawn
from tests.shared.net.loopback import until

PATIENCE_S = 20.0
RESET = struct.pack("ii", 1, 0)


def connected_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    near.setblocking(False)
    far.setblocking(False)
    return near, far


class Spliced:
    """A client and a server with a splice relay between them."""

    def __init__(self) -> None:
        self.client, downstream = connected_pair()
        self.server, upstream = connected_pair()
        self.loop = asyncio.get_running_loop()
        self.over: asyncio.Future[SpliceRelay] = self.loop.create_future()
        self.relay = SpliceRelay(downstream, upstream, self.over.set_result)
        self.relay.start()

    async def finished(self) -> SpliceRelay:
        return await asyncio.wait_for(self.over, PATIENCE_S)

    async def send(self, sock: socket.socket, data: bytes) -> None:
        await asyncio.wait_for(self.loop.sock_sendall(sock, data), PATIENCE_S)

    async def read(self, sock: socket.socket, size: int) -> bytes:
        """`size` bytes, or fewer if the peer ends before."""
        received = bytearray()
        while len(received) < size:
            data = await asyncio.wait_for(self.loop.sock_recv(sock, 1 << 16), PATIENCE_S)
            if not data:
                break
            received += data
        return bytes(received)

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest_asyncio.fixture
async def spliced() -> AsyncIterator[Spliced]:
    pair = Spliced()
    yield pair
    pair.close()


async def test_bytes_pass_both_ways_and_are_counted(spliced: Spliced) -> None:
    await spliced.send(spliced.client, b"question")
    assert await spliced.read(spliced.server, 8) == b"question"
    await spliced.send(spliced.server, b"answer")
    assert await spliced.read(spliced.client, 6) == b"answer"
    assert (spliced.relay.sent_bytes, spliced.relay.received_bytes) == (8, 6)


async def test_half_close_each_way_then_an_orderly_end(spliced: Spliced) -> None:
    await spliced.send(spliced.client, b"all of it")
    spliced.client.shutdown(socket.SHUT_WR)
    assert await spliced.read(spliced.server, 100) == b"all of it"
    await spliced.send(spliced.server, b"and the answer")
    spliced.server.shutdown(socket.SHUT_WR)
    assert await spliced.read(spliced.client, 100) == b"and the answer"
    relay = await spliced.finished()
    assert relay.error is None


async def test_much_passes_unchanged_both_ways_at_once(spliced: Spliced) -> None:
    up, down = os.urandom(16 << 20), os.urandom(16 << 20)

    async def pump(sender: socket.socket, receiver: socket.socket, data: bytes) -> bytes:
        async def send() -> None:
            await spliced.send(sender, data)
            sender.shutdown(socket.SHUT_WR)

        sending = asyncio.get_running_loop().create_task(send())
        received = await spliced.read(receiver, len(data) + 1)
        await sending
        return received

    got_up, got_down = await asyncio.gather(
        pump(spliced.client, spliced.server, up), pump(spliced.server, spliced.client, down)
    )
    assert hashlib.sha256(got_up).digest() == hashlib.sha256(up).digest()
    assert hashlib.sha256(got_down).digest() == hashlib.sha256(down).digest()
    assert (await spliced.finished()).error is None


@pytest.mark.parametrize("breaker", ["client", "server"])
async def test_a_reset_passes_on(spliced: Spliced, breaker: str) -> None:
    await spliced.send(spliced.client, b"x")
    assert await spliced.read(spliced.server, 1) == b"x"
    breaking = getattr(spliced, breaker)
    other = spliced.server if breaker == "client" else spliced.client
    breaking.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    breaking.close()
    relay = await spliced.finished()
    assert str(relay.error) == "connection reset: Connection reset by peer"
    assert relay.broken_downstream == (breaker == "client")
    with pytest.raises(ConnectionResetError):
        await spliced.read(other, 1)


async def test_a_server_that_answered_in_full_and_then_resets_loses_no_byte(spliced: Spliced) -> None:
    await spliced.send(spliced.server, b"the whole answer")
    spliced.server.shutdown(socket.SHUT_WR)
    assert await spliced.read(spliced.client, 100) == b"the whole answer"
    spliced.server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    spliced.server.close()
    spliced.client.close()
    assert (await spliced.finished()).error is None


async def test_a_slow_reader_stalls_the_sender_and_nothing_is_lost(spliced: Spliced) -> None:
    data = os.urandom(32 << 20)
    sending = asyncio.get_running_loop().create_task(spliced.send(spliced.client, data))
    # The sender stops when both sockets' buffers and the pipe are full: nobody reads.
    moved = -1
    while spliced.relay.sent_bytes != moved:
        moved = spliced.relay.sent_bytes
        await asyncio.sleep(0.05)
    assert moved < len(data)
    assert not sending.done()
    assert await spliced.read(spliced.server, len(data)) == data
    await sending


async def test_abort_resets_both_sides(spliced: Spliced) -> None:
    from shared.errors import StreamResetError

    spliced.relay.abort(StreamResetError("drained", 8))
    for sock in (spliced.client, spliced.server):
        with pytest.raises(ConnectionResetError):
            await spliced.read(sock, 1)
    assert str((await spliced.finished()).error) == "drained"


async def test_an_idle_connection_holds_no_pipe(spliced: Spliced) -> None:
    splice._spare.clear()
    await spliced.send(spliced.client, b"x")
    assert await spliced.read(spliced.server, 1) == b"x"
    assert len(splice._spare) == 1
    assert spliced.relay._up._pipe is None


async def test_a_relay_at_rest_can_be_ended_in_order(spliced: Spliced) -> None:
    await spliced.send(spliced.client, b"question")
    assert await spliced.read(spliced.server, 8) == b"question"
    error = LifetimeError("old")
    assert spliced.relay.expire(error)
    assert not spliced.relay.expire(error)
    assert await spliced.read(spliced.client, 1) == b""
    assert await spliced.read(spliced.server, 1) == b""
    assert (await spliced.finished()).error is error


async def test_a_relay_whose_peer_does_not_read_is_not_at_rest(spliced: Spliced) -> None:
    sending = spawn(spliced.loop.sock_sendall(spliced.client, bytes(64 << 20)), name="send")
    await until(lambda: spliced.relay.buffered_bytes > 0)
    assert not spliced.relay.expire(LifetimeError("old"))
    sending.cancel()
    spliced.relay.abort(LifetimeError("old"))
    assert spliced.relay.buffered_bytes == 0


async def test_a_half_closed_relay_is_not_at_rest(spliced: Spliced) -> None:
    spliced.client.shutdown(socket.SHUT_WR)
    assert await spliced.read(spliced.server, 1) == b""
    assert not spliced.relay.expire(LifetimeError("old"))
    spliced.relay.abort(LifetimeError("old"))

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import select
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import HboneError, LifetimeError, StreamResetError
from shared.net.legs.read_buffer import READ_BUFFER, READ_BYTES
from shared.net.legs.tcp_end import RESET_ON_CLOSE, queued_bytes
from shared.net.relay import splice
from shared.net.relay.edge_poll import ENDS, EdgePoll
from shared.net.relay.pipes import Pipes
from shared.net.relay.splice import FIN_BYTES, SpliceRelay
from tests.shared.net.loopback import FIN, RST, Peer, until

PATIENCE_S = 20.0
MUCH = random.Random(3).randbytes(8 << 20)
"""More than both sockets' buffers and a pipe hold, so that it goes through the kernel in several pieces."""

LOTS = MUCH * 4
"""More than all buffers on the way hold."""

PIPES = 64


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

    def __init__(self, edges: EdgePoll, pipes: Pipes, early: bytes) -> None:
        client, self.downstream = connected_pair()
        server, self.upstream = connected_pair()
        self.client = Peer(client)
        self.server = Peer(server)
        self.over: asyncio.Future[SpliceRelay] = asyncio.get_running_loop().create_future()
        self.relay = SpliceRelay(
            self.downstream, self.upstream, self.over.set_result, edges=edges, pipes=pipes, early=early
        )

    async def finished(self) -> SpliceRelay:
        return await asyncio.wait_for(self.over, PATIENCE_S)

    async def close(self) -> None:
        await self.client.close()
        await self.server.close()
        self.relay.abort(HboneError("the test is over"))


class Shared:
    """What all relays of a process share."""

    def __init__(self, most_pipes: int) -> None:
        self.edges = EdgePoll()
        self.pipes = Pipes(most_pipes)
        self._block = AsyncExitStack()

    def join(self, early: bytes = b"", *, start: bool = True) -> Spliced:
        """A tunnel until the test is over."""
        spliced = Spliced(self.edges, self.pipes, early)
        self._block.push_async_callback(spliced.close)
        if start:
            spliced.relay.start()
        return spliced

    async def close(self) -> None:
        await self._block.aclose()
        assert (len(self.edges), self.pipes.lent) == (0, 0)
        self.edges.close()
        self.pipes.close()


@asynccontextmanager
async def sharing(most_pipes: int = PIPES) -> AsyncIterator[Shared]:
    shared = Shared(most_pipes)
    try:
        yield shared
    finally:
        await shared.close()


@pytest.fixture(params=[PIPES, 0], ids=["spliced", "copied for want of pipes"])
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Shared]:
    async with sharing(request.param) as shared:
        yield shared


@pytest.fixture
async def spliced(shared: Shared) -> Spliced:
    return shared.join()


async def test_what_came_early_goes_first_and_is_counted(shared: Shared) -> None:
    spliced = shared.join(b"early, ", start=False)
    await spliced.client.send(b"late")
    spliced.client.fin()
    spliced.relay.start()
    assert await spliced.server.ended() == FIN
    assert bytes(spliced.server.received) == b"early, late"
    assert spliced.relay.sent_bytes == 11


async def test_early_bytes_that_the_upstream_is_slow_to_take(shared: Shared) -> None:
    spliced = shared.join(MUCH, start=False)
    spliced.relay.start()
    await spliced.server.send(b"greeting")
    assert await spliced.client.read(8) == b"greeting", "the other direction does not wait"
    assert 0 < spliced.relay.sent_bytes < len(MUCH)
    spliced.client.fin()
    assert await spliced.server.ended() == FIN
    assert bytes(spliced.server.received) == MUCH


async def test_half_close_each_way_then_an_orderly_end(spliced: Spliced) -> None:
    await spliced.client.send(b"all of it")
    spliced.client.fin()
    assert await spliced.server.ended() == FIN
    assert bytes(spliced.server.received) == b"all of it"
    for word in (b"and ", b"the ", b"answer"):
        await spliced.server.send(word)
        assert await spliced.client.read(len(word)) == word
    spliced.server.fin()
    assert await spliced.client.ended() == FIN
    assert (await spliced.finished()).error is None


async def test_the_server_ends_first(spliced: Spliced) -> None:
    await spliced.server.send(b"all I have")
    spliced.server.fin()
    assert await spliced.client.ended() == FIN
    await spliced.client.send(b"but I have more")
    assert await spliced.server.read(15) == b"but I have more"
    spliced.client.fin()
    assert await spliced.server.ended() == FIN
    assert (await spliced.finished()).error is None


async def test_an_end_that_came_before_the_start(shared: Shared) -> None:
    spliced = shared.join(b"hello", start=False)
    spliced.client.fin()
    await spliced.server.send(b"bye")
    spliced.server.fin()
    spliced.relay.start()
    assert await spliced.server.ended() == FIN
    assert await spliced.client.ended() == FIN
    assert (bytes(spliced.server.received), bytes(spliced.client.received)) == (b"hello", b"bye")
    assert (await spliced.finished()).error is None


async def test_much_passes_unchanged_both_ways_at_once(spliced: Spliced) -> None:
    up, down = os.urandom(32 << 20), os.urandom(32 << 20)
    for peer, data in ((spliced.client, up), (spliced.server, down)):
        peer.start_reading()
        peer.send_soon(data)
    for peer in (spliced.client, spliced.server):
        await peer.all_sent()
        peer.fin()
    for peer, data in ((spliced.client, down), (spliced.server, up)):
        assert await peer.ended() == FIN
        assert hashlib.sha256(peer.received).digest() == hashlib.sha256(data).digest()
    relay = await spliced.finished()
    assert (relay.error, relay.sent_bytes, relay.received_bytes) == (None, len(up), len(down))


# Breaks.


@pytest.mark.parametrize("breaker", ["client", "server"])
async def test_a_reset_passes_on(spliced: Spliced, breaker: str) -> None:
    await spliced.client.send(b"x")
    assert await spliced.server.read(1) == b"x"
    await (spliced.client if breaker == "client" else spliced.server).rst()
    relay = await spliced.finished()
    assert isinstance(relay.error, StreamResetError)
    assert str(relay.error) == "connection reset: Connection reset by peer"
    assert relay.broken_downstream == (breaker == "client")
    assert await (spliced.server if breaker == "client" else spliced.client).ended() == RST


@pytest.mark.parametrize("breaker", ["client", "server"])
async def test_a_reset_by_who_waits_for_the_others_rest(spliced: Spliced, breaker: str) -> None:
    """One has ended, the other goes on and breaks."""
    broken, other = (
        (spliced.client, spliced.server) if breaker == "client" else (spliced.server, spliced.client)
    )
    other.fin()
    assert await broken.ended() == FIN
    await broken.send(b"half an ans")
    assert await other.read(11) == b"half an ans"
    await broken.rst()
    relay = await spliced.finished()
    assert (relay.broken_downstream, relay.error is None) == (breaker == "client", False)
    assert await other.ended() == RST


async def test_a_server_that_answered_in_full_and_then_resets_loses_no_byte(spliced: Spliced) -> None:
    spliced.server.send_soon(MUCH)
    spliced.client.start_reading()
    await spliced.server.all_sent()
    spliced.server.fin()
    assert await spliced.client.ended() == FIN
    await spliced.server.rst()
    await spliced.client.send(b"nobody wants this")
    await spliced.client.send(b"or that")
    spliced.client.fin()
    relay = await spliced.finished()
    assert (relay.error, relay.received_bytes) == (None, len(MUCH))
    assert bytes(spliced.client.received) == MUCH


async def test_a_client_that_goes_on_for_ever_after_the_servers_end_and_reset(
    spliced: Spliced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splice, "LINGER_S", 0.2)
    spliced.server.fin()
    assert await spliced.client.ended() == FIN
    await spliced.server.rst()
    spliced.client.send_soon(MUCH)
    await spliced.client.all_sent()
    assert (await spliced.finished()).error is None


async def test_an_answer_that_waits_to_be_read_survives_a_write_that_fails(
    spliced: Spliced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has answered, ended and closed with bytes unread, which makes its kernel send RST. What it
    said is still on its way to a client that reads slowly, and sends meanwhile."""
    await spliced.client.send(b"never read")
    await until(lambda: spliced.relay.sent_bytes == 10)
    monkeypatch.setattr(splice, "LINGER_S", 0.2)
    sent = 0
    while spliced.relay.received_bytes == sent:  # then some of it waits for the relay
        sent += spliced.server.sock.send(MUCH[: 1 << 16])
        await asyncio.sleep(0.002)
        await until(lambda: not queued_bytes(spliced.server.sock.fileno()))
    spliced.server.fin()
    await asyncio.sleep(0.01)
    await spliced.server.close()
    await spliced.client.send(b"met by RST")
    await spliced.client.send(b"and dropped")
    assert await spliced.client.ended() == FIN
    assert len(spliced.client.received) == sent
    assert (await spliced.finished()).error is None


async def test_a_server_that_breaks_with_bytes_unread_has_not_ended(spliced: Spliced) -> None:
    """The error is met by writing, which uses it up: what can be read then looks like an end."""
    await spliced.client.send(b"x")
    await until(lambda: spliced.relay.sent_bytes == 1)
    spliced.client.start_reading()
    half = MUCH[:READ_BYTES]
    assert spliced.server.sock.send(half) == len(half)
    spliced.server.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    spliced.server.sock.close()
    assert spliced.client.sock.send(b"next question") == 13
    spliced.relay.ready(spliced.downstream.fileno(), select.EPOLLIN)  # before it is told of the server
    relay = await spliced.finished()
    assert (relay.broken_downstream, relay.received_bytes) == (False, len(half))
    assert str(relay.error) == "connection reset: Connection reset by peer"
    assert await spliced.client.ended() == RST
    assert bytes(spliced.client.received) == half


async def test_the_clients_last_words_arrive_after_it_is_gone(spliced: Spliced) -> None:
    """It ends, breaks off, and the server is slow to read what it said, and talks itself."""
    words = MUCH[: 1 << 20]
    await spliced.client.send(words)
    spliced.client.fin()
    await until(lambda: spliced.relay._up.ended)
    assert queued_bytes(spliced.upstream.fileno()) > FIN_BYTES
    await spliced.client.rst()
    assert spliced.server.sock.send(b"for nobody") == 10
    spliced.relay.ready(spliced.downstream.fileno(), ENDS)  # before these are read
    assert await spliced.server.ended() == FIN
    assert bytes(spliced.server.received) == words
    spliced.server.fin()
    assert (await spliced.finished()).error is None


async def test_a_server_that_goes_on_for_ever_after_the_clients_end_and_reset(
    spliced: Spliced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splice, "LINGER_S", 0.2)
    await spliced.client.send(MUCH[: 1 << 20])
    spliced.client.fin()
    await until(lambda: spliced.relay._up.ended)
    await spliced.client.rst()
    spliced.server.send_soon(LOTS)
    assert (await spliced.finished()).error is None


async def test_a_client_that_is_gone_after_its_end_is_noticed_at_once(spliced: Spliced) -> None:
    """Though nobody reads from it any more and nothing is written."""
    spliced.client.fin()
    assert await spliced.server.ended() == FIN
    await spliced.client.rst()
    assert (await spliced.finished()).error is None


async def test_abort_resets_both_sides(spliced: Spliced) -> None:
    spliced.relay.abort(StreamResetError("drained", 8))
    assert await spliced.client.ended() == RST
    assert await spliced.server.ended() == RST
    assert str((await spliced.finished()).error) == "drained"
    spliced.relay.abort(StreamResetError("once more", 8))


async def test_who_ends_and_gets_no_answer(shared: Shared) -> None:
    spliced = shared.join(start=False)
    spliced.relay._half_closed_timeout_s = 0.2
    spliced.relay.start()
    spliced.client.fin()
    await spliced.server.send(b"an answer")
    assert await spliced.client.read(9) == b"an answer"
    assert await spliced.client.ended() == RST
    assert str((await spliced.finished()).error) == (
        "half-closed: the client has ended, and for 0.2 s nothing came back"
    )


# The end of a lifetime.


async def test_a_relay_at_rest_can_be_ended_in_order(spliced: Spliced) -> None:
    await spliced.client.send(b"question")
    assert await spliced.server.read(8) == b"question"
    error = LifetimeError("old")
    assert spliced.relay.expire(error)
    assert not spliced.relay.expire(error)
    assert await spliced.client.ended() == FIN
    assert await spliced.server.ended() == FIN
    assert (await spliced.finished()).error is error


async def test_a_relay_whose_peer_does_not_read_is_not_at_rest(spliced: Spliced) -> None:
    spliced.client.send_soon(LOTS)
    await stalled(spliced, spliced.client)
    assert spliced.relay.buffered_bytes > 0
    assert not spliced.relay.expire(LifetimeError("old"))
    spliced.relay.abort(LifetimeError("old"))
    assert spliced.relay.buffered_bytes == 0
    assert await spliced.server.ended() == RST


async def test_a_half_closed_relay_is_not_at_rest(spliced: Spliced) -> None:
    spliced.client.fin()
    assert await spliced.server.ended() == FIN
    assert not spliced.relay.expire(LifetimeError("old"))


# Back pressure, fairness, pipes.


async def stalled(spliced: Spliced, sender: Peer) -> int:
    """Returns the number of bytes moved when nobody takes any more."""
    moved = -1
    while spliced.relay.sent_bytes + spliced.relay.received_bytes != moved:
        moved = spliced.relay.sent_bytes + spliced.relay.received_bytes
        await asyncio.sleep(0.05)
    assert sender.is_sending
    return moved


@pytest.mark.parametrize("reader", ["client", "server"])
async def test_a_slow_reader_stalls_the_sender_and_nothing_is_lost(spliced: Spliced, reader: str) -> None:
    data = LOTS
    slow, sender = (
        (spliced.client, spliced.server) if reader == "client" else (spliced.server, spliced.client)
    )
    sender.send_soon(data)
    assert await stalled(spliced, sender) < len(data)
    await slow.send(b"wait")
    assert await sender.read(4) == b"wait", "the other direction goes on"
    assert await slow.read(len(data)) == data
    await sender.all_sent()


async def test_no_pipe_is_held_but_while_bytes_wait_in_it() -> None:
    async with sharing() as shared:
        spliced = shared.join()
        spliced.client.send_soon(LOTS)
        await stalled(spliced, spliced.client)
        assert shared.pipes.lent == 1
        spliced.server.start_reading()
        await spliced.client.all_sent()
        await until(lambda: len(spliced.server.received) == len(LOTS))
        assert shared.pipes.lent == 0


async def test_stalled_tunnels_do_not_take_more_pipes_than_there_are() -> None:
    async with sharing(most_pipes=2) as shared:
        tunnels = [shared.join() for _ in range(5)]
        for spliced in tunnels:
            spliced.client.send_soon(LOTS)
        for spliced in tunnels:
            await stalled(spliced, spliced.client)
        assert shared.pipes.lent == 2
        for spliced in tunnels:
            assert await spliced.server.read(len(LOTS)) == LOTS


async def test_a_busy_direction_leaves_the_turn_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splice, "READ_BUFFER", READ_BUFFER[:1000])
    monkeypatch.setattr(splice, "READ_BYTES", 1000)
    monkeypatch.setattr(splice, "TURN_BYTES", 2000)
    async with sharing(most_pipes=0) as shared:
        spliced = shared.join(start=False)
        await spliced.client.send(MUCH[:10_000])
        spliced.relay.start()
        spliced.relay.ready(spliced.downstream.fileno(), select.EPOLLIN)
        assert spliced.relay.sent_bytes == 2000
        assert await spliced.server.read(10_000) == MUCH[:10_000], "its next turns come by themselves"


async def test_thousands_of_short_tunnels_leave_nothing_behind() -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    async with sharing() as shared:
        for number in range(3000):
            spliced = shared.join(b"hello")
            if number % 3:
                await spliced.server.send(b"bye")
                spliced.server.fin()
                spliced.client.fin()
                assert await spliced.client.ended() == FIN
            else:
                await (spliced.client if number % 2 else spliced.server).rst()
            await spliced.finished()
            await spliced.close()
        assert len(shared.edges) == 0
    assert len(os.listdir("/proc/self/fd")) <= open_before


# All of it in any order, against what TCP promises.

PIECES = (1, 64, 1000, 65_536, 300_000)
STEPS = st.lists(st.tuples(st.sampled_from(["client", "server"]), st.sampled_from(PIECES)), max_size=12)
ENDINGS = st.lists(
    st.tuples(st.sampled_from(["client", "server"]), st.sampled_from(["fin", "rst"])), min_size=1, max_size=3
)


@given(
    steps=STEPS, ends=ENDINGS, early=st.sampled_from([0, 517, 130_000]), pipes=st.sampled_from([0, 1, PIPES])
)
def test_any_order(steps: list[tuple[str, int]], ends: list[tuple[str, str]], early: int, pipes: int) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(any_order(steps, ends, early, pipes))


async def any_order(
    steps: list[tuple[str, int]], ends: list[tuple[str, str]], early: int, pipes: int
) -> None:
    async with sharing(pipes) as shared:
        spliced = shared.join(MUCH[:early], start=False)
        peers = {"client": spliced.client, "server": spliced.server}
        others = {"client": spliced.server, "server": spliced.client}
        said = {"client": bytearray(MUCH[:early]), "server": bytearray()}
        spliced.relay.start()
        for peer in peers.values():
            peer.start_reading()
        for who, size in steps:
            start = len(said[who])
            said[who] += MUCH[start : start + size]
            await peers[who].send(MUCH[start : start + size])
        finished: set[str] = set()
        breaker = ""
        for who, how in ends:
            if how == "fin" and who not in finished:
                finished.add(who)
                peers[who].fin()
            elif how == "rst":
                if who in finished:  # what its own kernel has not sent yet would be lost on its side
                    await until(lambda who=who: others[who].end == FIN)  # type: ignore[misc]  # a default
                await peers[who].rst()
                breaker = who
                break
        if breaker and breaker not in finished and finished != {"client", "server"}:
            relay = await spliced.finished()
            assert (relay.error is None, relay.broken_downstream) == (False, breaker == "client")
            assert await others[breaker].ended() == RST
            assert said[breaker].startswith(others[breaker].received)
            return
        for who in {"client", "server"} - finished - {breaker}:
            peers[who].fin()
        assert (await spliced.finished()).error is None
        for who in {"client", "server"} - {breaker}:
            if not breaker:
                assert await others[who].ended() == FIN
                assert others[who].received == said[who]
        if breaker:
            assert others[breaker].received == said[breaker]

"""The peek at the hello: real sockets, a real OpenSSL hello, and everything else that a port is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

from gateway.config.limit_settings import Limits
from gateway.ports.hello import ALERT_LINGER_S, ClientLeg, Hellos, turn_away
from shared.address import Address
from shared.errors import (
    ALERT_ACCESS_DENIED,
    HboneError,
    HelloTimeoutError,
    NoNameError,
    TokenError,
)
from shared.listen import bound_address, listen
from shared.net.legs.contract import Buffer, Leg
from shared.net.legs.tcp import EARLY_BYTES, TcpLeg
from shared.tls.client_hello import ClientHello
from tests.support.hellos import (
    ACCESS_DENIED,
    DECODE_ERROR,
    INTERNAL_ERROR,
    NAME,
    RECORD_HEADER_BYTES,
    UNRECOGNIZED_NAME,
    hello,
    in_records,
)
from tests.support.tcp_peer import PATIENCE_S, TcpPeer

SHORT_S = 0.2


@dataclass
class Taken:
    leg: ClientLeg
    hello: ClientHello
    started: float


@dataclass
class Refused:
    peer: str
    started: float
    error: HboneError


class WatchedLeg(asyncio.BufferedProtocol):
    """Says when `leg` has looked at what came. Around it: nothing can be derived from a compiled class."""

    def __init__(self, leg: ClientLeg, reads: asyncio.Queue[int]) -> None:
        self._leg = leg
        self._reads = reads
        self.connection_made = leg.connection_made  # type: ignore[method-assign]
        self.get_buffer = leg.get_buffer  # type: ignore[method-assign]
        self.eof_received = leg.eof_received  # type: ignore[method-assign]
        self.connection_lost = leg.connection_lost  # type: ignore[method-assign]
        self.pause_writing = leg.pause_writing  # type: ignore[method-assign]
        self.resume_writing = leg.resume_writing  # type: ignore[method-assign]

    def buffer_updated(self, nbytes: int) -> None:
        self._leg.buffer_updated(nbytes)
        self._reads.put_nowait(nbytes)


class Port:
    """A port whose connections are peeked at."""

    def __init__(self) -> None:
        self.hellos = Hellos(Limits(hello_timeout_s=PATIENCE_S), taken=self._taken, refused=self._refused)
        self.outcomes: asyncio.Queue[Taken | Refused] = asyncio.Queue()
        self.reads: asyncio.Queue[int] = asyncio.Queue()
        self.port = 0
        self._clients: list[TcpPeer] = []
        self._legs: list[ClientLeg] = []

    def accepted(self) -> WatchedLeg:
        return WatchedLeg(ClientLeg(self.hellos), self.reads)

    def _taken(self, leg: ClientLeg, peer: str, hello: ClientHello, started: float) -> None:
        assert leg.peer_name == peer
        self._legs.append(leg)
        self.outcomes.put_nowait(Taken(leg, hello, started))

    def _refused(self, peer: str, started: float, error: HboneError) -> None:
        self.outcomes.put_nowait(Refused(peer, started, error))

    async def client(self, first: bytes = b"") -> TcpPeer:
        client = await TcpPeer.connect(self.port)
        self._clients.append(client)
        if first:
            await client.send(first)
        return client

    async def taken(self) -> Taken:
        async with asyncio.timeout(PATIENCE_S):
            outcome = await self.outcomes.get()
        assert isinstance(outcome, Taken), outcome
        return outcome

    async def refused(self) -> Refused:
        async with asyncio.timeout(PATIENCE_S):
            outcome = await self.outcomes.get()
        assert isinstance(outcome, Refused), outcome
        return outcome

    async def let_go(self) -> None:
        """Closes all connections so far: a test of hundreds must not need as many descriptors."""
        for leg in self._legs:
            leg.abort()
        for client in self._clients:
            await client.close()
        self._legs.clear()
        self._clients.clear()

    async def read(self) -> None:
        """Returns once what was sent has been looked at."""
        async with asyncio.timeout(PATIENCE_S):
            await self.reads.get()


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    port = Port()
    listener = await listen(Address("127.0.0.1", 0), port.accepted, purpose="test")
    port.port = bound_address(listener).port
    yield port
    listener.close()
    await port.let_go()


class Joined:
    """A relay's end that keeps what a leg pushes."""

    def __init__(self, leg: TcpLeg) -> None:
        self.data = bytearray()
        self._ended = asyncio.Event()
        self._broken = asyncio.Event()
        leg.join(self)

    async def rest(self) -> bytes:
        """Everything up to the client's FIN."""
        async with asyncio.timeout(PATIENCE_S):
            await self._ended.wait()
        return bytes(self.data)

    async def broken(self) -> None:
        """Returns when the client has reset the connection."""
        async with asyncio.timeout(PATIENCE_S):
            await self._broken.wait()

    def received(self, leg: Leg, data: Buffer) -> None:
        self.data += data

    def ended(self, leg: Leg) -> None:
        self._ended.set()

    def failed(self, leg: Leg, error: HboneError) -> None:
        self._broken.set()

    def full(self, leg: Leg) -> None: ...

    def drained(self, leg: Leg) -> None: ...


def kept(leg: TcpLeg) -> bytes:
    """What the leg has kept for the far side so far."""
    return bytes(Joined(leg).data)


# Good hellos.


async def test_a_hello_is_read_and_kept_whole(port: Port) -> None:
    said = hello(alpn=("istio-peer-exchange", "istio"))
    client = await port.client(said)
    taken = await port.taken()
    assert taken.hello == ClientHello(NAME, ("istio-peer-exchange", "istio"), len(said))
    assert taken.leg.peer_name == client.address
    assert kept(taken.leg) == said


async def test_what_follows_the_hello_is_kept_with_it(port: Port) -> None:
    said = hello() + b"early data" * 1000
    await port.client(said)
    taken = await port.taken()
    assert kept(taken.leg) == said


async def test_more_than_a_leg_keeps_waits_with_the_client(port: Port) -> None:
    said = hello() + bytes(16 * EARLY_BYTES) + b"the end"
    client = await port.client()
    client.send_soon(said)
    client.end()
    assert await Joined((await port.taken()).leg).rest() == said


async def test_split_over_two_segments_anywhere(port: Port) -> None:
    said = hello()
    for at in range(1, len(said)):
        client = await port.client(said[:at])
        await port.read()
        assert port.outcomes.empty(), f"decided after {at} bytes"
        await client.send(said[at:])
        taken = await port.taken()
        await port.read()
        assert kept(taken.leg) == said
        await port.let_go()


async def test_split_over_two_records_anywhere(port: Port) -> None:
    said = hello()
    for at in range(1, len(said) - RECORD_HEADER_BYTES):
        split = in_records(said, at)
        await port.client(split)
        taken = await port.taken()
        assert taken.hello.server_name == NAME
        assert kept(taken.leg) == split
        await port.let_go()


async def test_a_byte_a_segment(port: Port) -> None:
    said = in_records(hello(), 1, 5, 40)
    client = await port.client()
    for at in range(len(said)):
        await client.send(said[at : at + 1])
        await port.read()
    assert kept((await port.taken()).leg) == said


# Bad ones.


async def test_every_prefix_that_is_cut_off_is_refused(port: Port) -> None:
    said = hello()
    for at in range(1, len(said), 7):
        client = await port.client(said[:at])
        client.end()
        assert await client.rest() == DECODE_ERROR
        assert str((await port.refused()).error) == f"closed after {at} bytes of a ClientHello"


async def test_a_reset_is_refused_like_an_end(port: Port) -> None:
    client = await port.client(hello()[:50])
    address = client.address
    await port.read()
    client.reset()
    refused = await port.refused()
    assert (refused.error.flag, refused.peer) == ("BAD_HELLO", address)


async def test_a_name_is_needed(port: Port) -> None:
    client = await port.client(hello(None))
    assert await client.rest() == UNRECOGNIZED_NAME
    assert isinstance((await port.refused()).error, NoNameError)


# Slow ones.


async def test_a_silent_client_is_closed(port: Port) -> None:
    port.hellos.use_limits(Limits(hello_timeout_s=SHORT_S))
    client = await port.client()
    assert await client.rest() == b""
    refused = await port.refused()
    assert isinstance(refused.error, HelloTimeoutError)
    assert str(refused.error) == "no whole ClientHello within 0.2 s, got 0 bytes"
    assert asyncio.get_running_loop().time() - refused.started >= SHORT_S * 0.9


async def test_the_deadline_is_for_the_whole_hello(port: Port) -> None:
    port.hellos.use_limits(Limits(hello_timeout_s=SHORT_S))
    client = await port.client()
    for byte in hello():
        client.send_soon(bytes((byte,)))
        with suppress(TimeoutError):  # which is how this client takes its time
            async with asyncio.timeout(SHORT_S / 10):
                assert (await port.refused()).error.flag == "HELLO_TIMEOUT"
                return
    raise AssertionError("a byte now and then kept the connection")


# Stopping.


async def test_a_peek_can_be_stopped(port: Port) -> None:
    client = await port.client(hello()[:100])
    await port.read()
    [peek] = port.hellos.peeking
    error = TokenError("enough")
    peek.stop(error)
    assert port.hellos.peeking == set()
    assert (await port.refused()).error is error
    assert await client.rest() == INTERNAL_ERROR
    peek.stop(error)
    assert port.outcomes.empty(), "told once"


async def test_a_peek_is_over_with_its_outcome(port: Port) -> None:
    await port.client(hello())
    await port.taken()
    await port.client(b"no hello")
    await port.refused()
    assert port.hellos.peeking == set()


async def test_a_leg_tells_when_it_is_gone(port: Port) -> None:
    client = await port.client(hello())
    leg = (await port.taken()).leg
    gone = asyncio.Event()
    leg.when_lost(gone.set)
    leg.write(b"last words")
    leg.close()
    assert not gone.is_set()
    assert await client.rest() == b"last words"
    async with asyncio.timeout(PATIENCE_S):
        await gone.wait()
    again = asyncio.Event()
    leg.when_lost(again.set)
    assert again.is_set(), "told at once when it is gone already"


# Turning away.


async def test_a_client_that_is_still_sending_gets_its_alert(port: Port) -> None:
    """Closing with bytes unread would make the kernel send RST, and the alert would be lost."""
    client = await port.client(hello())
    leg = (await port.taken()).leg
    leg.pause_reading()  # as it does by itself when a client sends more than it keeps
    turn_away(leg.release(), ALERT_ACCESS_DENIED)
    await client.send(bytes(8 << 20))
    assert await client.rest() == ACCESS_DENIED


async def test_a_refused_client_that_stays_is_closed(port: Port) -> None:
    client = await port.client(hello(None))
    refused_at = asyncio.get_running_loop().time()
    assert await client.rest() == UNRECOGNIZED_NAME
    await client.send(b"still here")
    with pytest.raises(ConnectionError):
        while asyncio.get_running_loop().time() < refused_at + PATIENCE_S:
            await client.send(b"and still")
            await asyncio.sleep(ALERT_LINGER_S / 10)
    assert asyncio.get_running_loop().time() - refused_at >= ALERT_LINGER_S * 0.9


async def test_a_client_that_has_sent_fin_gets_its_alert(port: Port) -> None:
    client = await port.client(hello())
    client.end()
    leg = (await port.taken()).leg
    await Joined(leg).rest()
    turn_away(leg.release(), ALERT_ACCESS_DENIED)
    assert await client.rest() == ACCESS_DENIED


async def test_a_client_that_is_gone_is_told_nothing(port: Port) -> None:
    client = await port.client(hello())
    leg = (await port.taken()).leg
    joined = Joined(leg)
    client.reset()
    await joined.broken()
    turn_away(leg.release(), ALERT_ACCESS_DENIED)

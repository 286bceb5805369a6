"""An HTTP/2 connection in the bytes of a stream. Both ends are ours; in krun's tests h2 is the far one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from shared.errors import HboneError, UpstreamError
from shared.http2.events import Headers
from shared.http2.session import SessionLimits
from shared.net.http2.connection import Connection
from shared.net.http2.connection_leg import ConnectionLeg
from shared.net.legs.contract import Buffer, Leg
from shared.net.legs.stream import Stream
from shared.net.relay.relay import Relay
from tests.shared.net.loopback import until
from tests.support.tcp_peer import PATIENCE_S

REQUEST: Headers = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":authority", b"a"),
    (b":path", b"/"),
]
OK: Headers = [(b":status", b"200")]

BODY = bytes(range(256)) * (4 << 10)
"""1 MiB, as much as a stream's whole window at first."""


@dataclass
class Echo:
    """Sends back what a stream gets."""

    stream: Stream

    def received(self, leg: Leg, data: Buffer) -> None:
        self.stream.write(data)

    def ended(self, leg: Leg) -> None:
        self.stream.write_eof()

    def failed(self, leg: Leg, error: HboneError) -> None: ...

    def full(self, leg: Leg) -> None:
        self.stream.pause_reading()

    def drained(self, leg: Leg) -> None:
        self.stream.resume_reading()


@dataclass
class Kept:
    """Keeps what a stream gets."""

    data: bytearray = field(default_factory=bytearray)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    error: HboneError | None = None

    def received(self, leg: Leg, data: Buffer) -> None:
        self.data += data

    def ended(self, leg: Leg) -> None:
        self.over.set()

    def failed(self, leg: Leg, error: HboneError) -> None:
        self.error = error
        self.over.set()

    def full(self, leg: Leg) -> None: ...

    def drained(self, leg: Leg) -> None: ...


class Tunnel:
    """A stream of a connection over TCP, and in it a connection whose client is the server of the outer
    one."""

    def __init__(self) -> None:
        self.relays: list[Relay] = []
        self.lost: list[Connection] = []
        self.inner_server = Connection(client=False, on_request=self._asked, on_lost=self.lost.append)
        self.inner_client = Connection(client=True, on_lost=self.lost.append)

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: Connection(client=False, on_request=self._outer, limits=SessionLimits()), "127.0.0.1", 0
        )
        port = self._listener.sockets[0].getsockname()[1]
        _, self.outer = await loop.create_connection(lambda: Connection(client=True), "127.0.0.1", port)
        await until(lambda: self.outer.speaks_http2)
        stream = self.outer.open(REQUEST)
        assert await stream.response(PATIENCE_S) == 200
        self._join(ConnectionLeg(self.inner_server, stream), stream)
        await until(lambda: self.inner_client.speaks_http2)

    def _outer(self, stream: Stream) -> None:
        stream.respond(OK)
        self._join(stream, ConnectionLeg(self.inner_client, stream))

    def _join(self, downstream: Leg, upstream: Leg) -> None:
        relay = Relay(downstream, upstream, lambda _: None)
        self.relays.append(relay)
        relay.start()

    def _asked(self, stream: Stream) -> None:
        stream.respond(OK)
        stream.join(Echo(stream))

    async def close(self) -> None:
        self.outer.abort("the test is over")
        self._listener.close()
        await until(lambda: len(self.lost) == 2)


@pytest.fixture
async def tunnel() -> AsyncIterator[Tunnel]:
    tunnel = Tunnel()
    await tunnel.open()
    yield tunnel
    await tunnel.close()


async def asked(tunnel: Tunnel) -> tuple[Stream, Kept]:
    stream, kept = tunnel.inner_client.open(REQUEST), Kept()
    assert await stream.response(PATIENCE_S) == 200
    stream.join(kept)
    return stream, kept


async def test_many_streams_with_much_on_each(tunnel: Tunnel) -> None:
    streams = [await asked(tunnel) for _ in range(8)]
    for stream, _ in streams:
        for _ in range(4):
            stream.write(BODY)
        stream.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        for _, kept in streams:
            await kept.over.wait()
    assert [bytes(kept.data) for _, kept in streams] == [4 * BODY] * 8


async def test_a_tunnel_that_breaks(tunnel: Tunnel) -> None:
    _, kept = await asked(tunnel)
    tunnel.relays[1].abort(UpstreamError("broken"))
    await kept.over.wait()
    assert kept.error is not None
    await until(lambda: len(tunnel.lost) == 2)
    assert all(relay.over for relay in tunnel.relays)


@pytest.mark.parametrize("who", ["inner_client", "inner_server"])
async def test_a_connection_that_closes_in_order(tunnel: Tunnel, who: str) -> None:
    closing: Connection = getattr(tunnel, who)
    closing.close()
    await until(lambda: len(tunnel.lost) == 2)
    assert [relay.error for relay in tunnel.relays] == [None, None]
    assert tunnel.inner_client.cause == tunnel.inner_server.cause == ""


async def test_a_connection_that_is_dropped(tunnel: Tunnel) -> None:
    tunnel.inner_client.abort("not wanted")
    await until(lambda: len(tunnel.lost) == 2)
    assert str(tunnel.relays[0].error or tunnel.relays[1].error) == "not wanted"


async def test_a_drain_lets_a_stream_finish(tunnel: Tunnel) -> None:
    stream, kept = await asked(tunnel)
    tunnel.inner_client.drain()
    await until(lambda: tunnel.inner_server.goaway_code is not None)
    stream.write(b"after GOAWAY")
    stream.write_eof()
    await kept.over.wait()
    assert bytes(kept.data) == b"after GOAWAY"
    await until(lambda: len(tunnel.lost) == 2)


async def test_one_that_never_began(tunnel: Tunnel) -> None:
    lost: list[Connection] = []
    connection = Connection(client=True, on_lost=lost.append)
    ConnectionLeg(connection, tunnel.outer.open(REQUEST)).abort()
    await until(lambda: lost == [connection])

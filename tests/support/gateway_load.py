"""What a gateway is busy with while something is done to it: clients that come and go, clients that stay, and
a service that sends everything back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from shared.address import Address
from shared.errors import HboneError
from shared.listen import bound_address, listen
from shared.net.http2.connection import Connection
from shared.net.legs.contract import Buffer, Leg
from shared.net.legs.stream import Stream
from shared.tasks import spawn
from tests.support.hellos import hello
from tests.support.tcp_peer import PATIENCE_S, TcpPeer

HELLO = hello()


class Echo:
    """The relay of one stream whose bytes all go back."""

    def __init__(self, stream: Stream) -> None:
        stream.respond([(b":status", b"200")])
        stream.join(self)

    def received(self, leg: Leg, data: Buffer) -> None:
        leg.write(data)

    def ended(self, leg: Leg) -> None:
        leg.write_eof()

    def failed(self, leg: Leg, error: HboneError) -> None:
        pass

    def full(self, leg: Leg) -> None:
        leg.pause_reading()

    def drained(self, leg: Leg) -> None:
        leg.resume_reading()


class EchoService:
    """A service behind the gateway, HTTP/2 without TLS."""

    def __init__(self) -> None:
        self.port = 0
        self.connections: set[Connection] = set()

    def _accept(self) -> Connection:
        connection = Connection(
            client=False,
            on_request=self.serve,
            on_lost=self.connections.discard,
        )
        self.connections.add(connection)
        return connection

    def serve(self, stream: Stream) -> None:
        """A tunnel is asked for."""
        Echo(stream)

    @classmethod
    @asynccontextmanager
    async def listening(cls) -> AsyncIterator[Self]:
        """On a free loopback port, until the block ends."""
        self = cls()
        listener = await listen(Address("127.0.0.1", 0), self._accept, purpose="echo")
        self.port = bound_address(listener).port
        try:
            yield self
        finally:
            listener.close()
            for connection in list(self.connections):
                connection.abort("the test is over")


async def say(client: TcpPeer, data: bytes) -> None:
    """Sends `data` and holds that it comes back."""
    await client.send(data)
    assert await client.read(len(data)) == data


class Load:
    """Made by `flowing`: clients that connect, are echoed, and end in order, all the time."""

    pause_s = 0.0
    """Between two clients."""
    faults: tuple[type[Exception], ...] = (OSError, EOFError, AssertionError, TimeoutError)
    """What a client that fails meets."""

    def __init__(self, port: int, clients: int) -> None:
        self.served = 0
        self.failed: Counter[str] = Counter()
        self._port = port
        self._changed = asyncio.Event()
        self._stopping = False
        self._tasks = [spawn(self._come_and_go(), name="load") for _ in range(clients)]

    async def more(self, count: int) -> None:
        """Returns when so many more have been served."""
        wanted = self.served + count
        async with asyncio.timeout(PATIENCE_S):
            while self.served < wanted and not self.failed:
                self._changed.clear()
                await self._changed.wait()

    async def stop(self) -> None:
        """Those that are there finish."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _come_and_go(self) -> None:
        while not self._stopping:
            try:
                await self._visit()
                self.served += 1
            except self.faults as error:
                self.failed[f"{type(error).__name__}: {error}"] += 1
            self._changed.set()
            await asyncio.sleep(self.pause_s)

    async def _visit(self) -> None:
        async with TcpPeer.connected(self._port) as client:
            await say(client, HELLO)
            client.end()
            assert await client.rest() == b""


@asynccontextmanager
async def flowing(port: int, clients: int = 4) -> AsyncIterator[Load]:
    """So many clients at a time, until the block ends."""
    load = Load(port, clients)
    try:
        yield load
    finally:
        await load.stop()


class Staying:
    """Made by `staying`: open tunnels."""

    def __init__(self) -> None:
        self.clients: list[TcpPeer] = []
        self._count = 0

    async def talk(self) -> None:
        """Holds that all of them still carry bytes."""
        self._count += 1
        await asyncio.gather(*(say(client, b"round %d" % self._count) for client in self.clients))

    async def end(self) -> None:
        """Ends all of them in order."""
        for client in self.clients:
            client.end()
        assert [await client.rest() for client in self.clients] == [b""] * len(self.clients)


@asynccontextmanager
async def staying(port: int, count: int) -> AsyncIterator[Staying]:
    """So many open tunnels, until the block ends."""
    tunnels = Staying()
    try:
        for _ in range(count):
            tunnels.clients.append(await TcpPeer.connect(port))
        await asyncio.gather(*(say(client, HELLO) for client in tunnels.clients))
        yield tunnels
    finally:
        for client in tunnels.clients:
            await client.close()

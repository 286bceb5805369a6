"""Local connections and their way, which a test plays."""

from __future__ import annotations

import asyncio

import pytest

from hbone.forward.connections import Connections
from hbone.forward.local_ports import TargetPort
from hbone.forward.reports import Troubles
from shared.address import Address
from shared.errors import DialError, HboneError
from shared.net.dial import dial
from shared.net.legs.contract import Leg
from tests.shared.net.loopback import until
from tests.support.tcp_peer import TcpPeer, TcpServer


class Way:
    """Leads to a port of loopback, once the test lets it."""

    def __init__(self, port: int) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.causes: list[str] = []
        self._port = port

    def __str__(self) -> str:
        return "DB of a"

    async def open(self) -> Leg:
        await self.is_open.wait()
        return await dial(Address("127.0.0.1", self._port), 5)

    def cause(self, error: HboneError, leg: Leg, age_s: float) -> str:
        self.causes.append(str(error))
        return str(error)


@pytest.fixture
def way(target: TcpServer) -> Way:
    return Way(target.port)


async def opened(way: Way, most: int = 10) -> TargetPort:
    port = TargetPort(Address("127.0.0.1", 0), Connections(Troubles(), most), way)
    await port.open()
    return port


def number(port: TargetPort) -> int:
    assert isinstance(port.place, Address)
    return port.place.port


async def test_bytes_are_counted(way: Way, target: TcpServer) -> None:
    port = await opened(way)
    async with TcpPeer.connected(number(port)) as client:
        there = await target.accept()
        await client.send(b"ping")
        assert await there.read(4) == b"ping"
        await there.send(b"pong!")
        assert await client.read(5) == b"pong!"
        assert "1 open" in port.connections.rates()
        assert "(4 B)" in port.connections.rates()
        there.end()
        client.end()
        await until(lambda: len(port.connections) == 0)
    assert "0 open, 0 B/s to the container (4 B), 0 B/s from it (5 B)" in port.connections.rates()
    port.close()


async def test_one_more_than_there_may_be_is_reset(
    way: Way, target: TcpServer, caplog: pytest.LogCaptureFixture
) -> None:
    port = await opened(way, most=1)
    async with TcpPeer.connected(number(port)) as first:
        there = await target.accept()
        async with TcpPeer.connected(number(port)) as second:
            assert await second.was_reset()
        assert caplog.messages == ["a connection was refused: 1 are open, which is as many as there may be"]
        await there.send(b"still here")
        assert await first.read(10) == b"still here"
    port.close()


async def test_a_far_side_that_breaks_off_resets_the_client(way: Way, target: TcpServer) -> None:
    port = await opened(way)
    async with TcpPeer.connected(number(port)) as client:
        (await target.accept()).reset()
        assert await client.was_reset()
    (cause,) = way.causes
    assert cause.startswith("connection reset: ")
    port.close()


async def test_a_way_that_does_not_open(target: TcpServer, caplog: pytest.LogCaptureFixture) -> None:
    class Closed(Way):
        async def open(self) -> Leg:
            raise DialError("nobody there")

    port = await opened(Closed(target.port))
    async with TcpPeer.connected(number(port)) as client:
        assert await client.was_reset()
    assert caplog.messages == ["DB of a: not opened: nobody there"]
    port.close()


async def test_the_end_waits_for_what_is_open(way: Way, target: TcpServer) -> None:
    port = await opened(way)
    async with TcpPeer.connected(number(port)) as client:
        there = await target.accept()
        port.close()
        finishing = asyncio.get_running_loop().create_task(port.connections.finish(20))
        await client.send(b"last words")
        client.end()
        assert await there.rest() == b"last words"
        assert not finishing.done()
        there.end()
        await finishing


async def test_the_end_resets_what_stays(way: Way, target: TcpServer) -> None:
    port = await opened(way)
    way.is_open.clear()
    async with TcpPeer.connected(number(port)) as opening:
        await until(lambda: len(port.connections) == 1)
        way.is_open.set()
        there = await target.accept()
        await port.connections.finish(0.01)
        assert await opening.was_reset()
        assert await there.was_reset()
    assert len(port.connections) == 0
    port.close()


async def test_the_end_resets_what_is_being_opened(way: Way) -> None:
    port = await opened(way)
    way.is_open.clear()
    async with TcpPeer.connected(number(port)) as opening:
        await until(lambda: len(port.connections) == 1)
        await port.connections.finish(0.01)
        assert await opening.was_reset()
    assert len(port.connections) == 0
    port.close()

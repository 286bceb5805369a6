"""The addresses that clients connect to: several of them, a successor beside them, and their end."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

import pytest

from gateway.ports.listeners import Listeners, keys
from shared.address import Address
from shared.errors import EXIT_OK, UnavailableError
from shared.listen import bound_address, listen
from shared.net.listen_close import listening_on
from shared.tasks import spawn
from tests.support import network
from tests.support.gateway_load import EchoService, flowing, staying
from tests.support.gateway_world import tunnel
from tests.support.hgate_process import hgate
from tests.support.running_gateway import change_config, write_config
from tests.support.tcp_peer import TcpPeer

FREE = Address("127.0.0.1", 0)


class Greeter(asyncio.Protocol):
    """Says who it is and hangs up."""

    def __init__(self, name: bytes) -> None:
        self._name = name

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast("asyncio.Transport", transport)
        stream.write(self._name)
        stream.close()


def greeting(name: bytes) -> Listeners:
    return Listeners(lambda: Greeter(name))


def free_port() -> Address:
    """An address that can be listened on several times, which port 0 would not be."""
    return Address("127.0.0.1", network.free_port())


async def greeted_by(address: Address) -> bytes:
    async with TcpPeer.connected(address.port) as client:
        return await client.rest()


# Opening and closing.


async def test_all_addresses_are_listened_on() -> None:
    one, two = free_port(), free_port()
    listeners = greeting(b"a")
    await listeners.open([one, two])
    assert [await greeted_by(one), await greeted_by(two)] == [b"a", b"a"]
    await listeners.open([one, two])
    assert listening_on(one) == 1, "what is open stays as it is"
    await listeners.close()
    assert [listening_on(one), listening_on(two)] == [0, 0]


async def test_one_that_cannot_be_had_leaves_all_as_they_were() -> None:
    one, two = free_port(), free_port()
    taken = await listen(FREE, asyncio.Protocol, purpose="test")
    listeners = greeting(b"a")
    await listeners.open([one])
    with pytest.raises(
        UnavailableError, match=rf"^listen: cannot listen on {bound_address(taken)}: the port"
    ):
        await listeners.open([one, two, bound_address(taken)])
    assert [listening_on(one), listening_on(two)] == [1, 0]
    taken.close()
    await listeners.close()


async def test_what_is_not_wanted_any_more_is_closed() -> None:
    one, two = free_port(), free_port()
    listeners = greeting(b"a")
    await listeners.open([one, two])
    await listeners.keep_only([two])
    assert [listening_on(one), listening_on(two)] == [0, 1]
    with pytest.raises(ConnectionRefusedError):
        await TcpPeer.connect(one.port)
    assert await greeted_by(two) == b"a"
    listeners.abort()
    with pytest.raises(ConnectionRefusedError):
        await TcpPeer.connect(two.port)


async def test_what_is_closed_for_good_stays_closed() -> None:
    """As when a reload is still at work while a drain begins."""
    address = free_port()
    for close in (Listeners.close, Listeners.abort):
        listeners = greeting(b"a")
        if (closing := close(listeners)) is not None:
            await closing
        with pytest.raises(UnavailableError, match=r": the gateway stops$"):
            await listeners.open([address])
        assert listening_on(address) == 0


def test_equal_addresses_are_told_apart() -> None:
    other = Address("127.0.0.1", 5)
    assert keys([FREE, other, FREE]) == [(FREE, 0), (other, 0), (FREE, 1)]


async def test_a_settled_port_in_place_of_port_0() -> None:
    settled = free_port()
    listeners = Listeners(lambda: Greeter(b"a"), ports={(FREE, 1): settled})
    await listeners.open([FREE, FREE])
    assert await greeted_by(settled) == b"a"
    await listeners.close()


# Who listens.


async def test_company_is_another_process_on_every_address() -> None:
    one, two = free_port(), free_port()
    listeners, successor = greeting(b"a"), greeting(b"b")
    assert not listeners.have_company()
    await listeners.open([one, two])
    assert not listeners.have_company()
    await successor.open([one])
    assert not listeners.have_company()
    await successor.open([one, two])
    assert listeners.have_company()
    await successor.close()
    await listeners.close()


async def test_siblings_are_no_company() -> None:
    address = free_port()
    siblings = [Listeners(lambda: Greeter(b"a"), siblings=2) for _ in "12"]
    for sibling in siblings:
        await sibling.open([address])
    assert not siblings[0].have_company()
    for sibling in siblings:
        await sibling.close()


# Nobody is lost.


@pytest.mark.parametrize("rounds", [5])
async def test_a_successor_gets_who_comes_meanwhile(rounds: int) -> None:
    """New clients all the time, while one after the other takes the port over: none is refused or reset."""
    address = free_port()
    served: Counter[bytes] = Counter()
    over = asyncio.Event()

    async def come_and_go() -> None:
        while not over.is_set():
            served[await greeted_by(address)] += 1

    running = greeting(b"0")
    await running.open([address])
    clients = [spawn(come_and_go(), name="client") for _ in range(8)]
    for number in range(1, rounds + 1):
        successor = greeting(b"%d" % number)
        await successor.open([address])
        await running.close()
        running = successor
    over.set()
    await asyncio.gather(*clients)
    assert sum(served.values()) > rounds
    assert served[b"%d" % rounds] > 0
    await running.close()


# As processes.


@pytest.fixture
async def file(tmp_path: Path) -> AsyncIterator[Path]:
    """A gateway's file with ports that can be taken several times, and an echo behind its route."""
    async with EchoService.listening() as service:
        file = tmp_path / "hgate.yaml"
        write_config(file, [tunnel(service.port)])
        ports = {name: str(free_port()) for name in ("admin", "metrics", "health")}
        change_config(file, **ports, listen=[str(free_port())])
        yield file


async def test_a_rolling_restart_fails_no_connection_and_breaks_no_tunnel(file: Path) -> None:
    async with AsyncExitStack() as block:
        old = await block.enter_async_context(hgate(file))
        load = await block.enter_async_context(flowing(old.port))
        for _ in range(3):
            tunnels = await block.enter_async_context(staying(old.port, 20))
            new = await block.enter_async_context(hgate(file))
            await new.said("^another process listens on ")
            old.process.send(signal.SIGTERM)
            await old.said("^draining: ")
            await load.more(20)
            await tunnels.talk()
            await tunnels.end()
            assert await old.ended() == EXIT_OK
            old = new
        await load.more(20)
        await load.stop()
        assert not load.failed
        assert load.served > 80
        old.process.send(signal.SIGTERM)
        assert await old.ended() == EXIT_OK
        assert {line["flags"] for line in old.lines} == {"-"}


async def test_a_successor_takes_the_other_ports_too(file: Path) -> None:
    async with AsyncExitStack() as block:
        old = await block.enter_async_context(hgate(file))
        tunnels = await block.enter_async_context(staying(old.port, 1))
        new = await block.enter_async_context(hgate(file))
        assert await new.is_ready()
        old.process.send(signal.SIGTERM)
        for server in ("health", "metrics", "admin"):
            await old.said(f"^{server} on .* is left to the other process that listens there$")
        assert all([await new.is_ready() for _ in range(20)]), "nobody hears of the drain any more"
        assert await new.metric("hbone_connections_open") == 0
        await tunnels.talk()
        await tunnels.end()
        assert await old.ended() == EXIT_OK


async def test_a_late_successor_takes_them_as_well(file: Path) -> None:
    async with AsyncExitStack() as block:
        old = await block.enter_async_context(hgate(file))
        tunnels = await block.enter_async_context(staying(old.port, 1))
        old.process.send(signal.SIGTERM)
        await old.said("^draining: 1 connections ")
        assert (await old.get("health", "/healthz/ready")).body == b"draining\n"
        new = await block.enter_async_context(hgate(file))
        await old.said("^admin on .* is left to the other process that listens there$")
        assert await new.is_ready()
        await tunnels.talk()
        await tunnels.end()
        assert await old.ended() == EXIT_OK

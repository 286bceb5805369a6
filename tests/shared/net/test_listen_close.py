"""Listening sockets that are given up: who waits is served, and who listens beside us gets those who come."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from shared.address import Address
from shared.listen import bound_address, listen
from shared.net.listen_close import HANDSHAKES_S, close_listening, listening_on
from tests.support import network
from tests.support.tcp_peer import PATIENCE_S, TcpPeer

FREE = Address("127.0.0.1", 0)


class Greeter(asyncio.Protocol):
    """Says a letter and hangs up."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast("asyncio.Transport", transport)
        stream.write(b"a")
        stream.close()


# Who listens.


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "0.0.0.0", *(pytest.param(host, marks=network.needs_ipv6) for host in ("::1", "::"))],
)
async def test_who_listens_is_counted(host: str) -> None:
    first = await listen(Address(host, 0), asyncio.Protocol, purpose="test", shared=True)
    with closing(first):
        address = Address(host, bound_address(first).port)
        await counted(address, 1)
        with closing(await listen(address, asyncio.Protocol, purpose="test", shared=True)):
            await counted(address, 2)
        with socket.create_connection(("::1" if ":" in host else "127.0.0.1", address.port)):
            await counted(address, 1)  # connections do not count
    await counted(address, 0)


async def counted(address: Address, number: int) -> None:
    """Waits until so many listen: the kernel's list is read in pieces, and sockets of others that come and go
    meanwhile can hide an entry or show it twice."""
    async with asyncio.timeout(PATIENCE_S):
        while listening_on(address) != number:  # noqa: ASYNC110  # nobody tells when it changes
            await asyncio.sleep(0.01)


def test_nobody_can_tell_without_proc(tmp_path: Path) -> None:
    assert listening_on(FREE, tmp_path) == 0


# Nobody is lost.


async def test_who_waits_to_be_accepted_is_served() -> None:
    """They are in the kernel's queue, and a closed socket would reset them."""
    server = await listen(FREE, Greeter, purpose="test")
    address = bound_address(server)
    clients = [
        socket.create_connection(("127.0.0.1", address.port)) for _ in range(100)
    ]  # no turn of the loop
    await close_listening([server], Greeter)
    with pytest.raises(ConnectionRefusedError):
        await TcpPeer.connect(address.port)
    for client in clients:
        reader, writer = await asyncio.open_connection(sock=client)
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b"a"
        writer.close()
        await writer.wait_closed()


async def test_who_has_gone_again_does_no_harm() -> None:
    server = await listen(FREE, Greeter, purpose="test")
    address = bound_address(server)
    for _ in range(10):
        TcpPeer(*await asyncio.open_connection("127.0.0.1", address.port)).reset()
    client = socket.create_connection(("127.0.0.1", address.port))
    client.close()
    await close_listening([server], Greeter)


async def test_who_comes_while_another_process_listens_is_left_to_it() -> None:
    server = await listen(FREE, Greeter, purpose="test", shared=True)
    address = bound_address(server)
    successor = await listen(address, Greeter, purpose="test", shared=True)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await close_listening([server], Greeter)
    assert loop.time() - began > HANDSHAKES_S / 2, "handshakes that are under way may end"
    assert listening_on(address) == 1
    async with TcpPeer.connected(address.port) as client:
        assert await client.rest() == b"a"
    successor.close()


async def test_siblings_that_end_with_us_are_nobody_to_leave_it_to() -> None:
    servers = [await listen(FREE, Greeter, purpose="test", shared=True)]
    address = bound_address(servers[0])
    servers.append(await listen(address, Greeter, purpose="test", shared=True))
    loop = asyncio.get_running_loop()
    began = loop.time()
    await close_listening(servers, Greeter, siblings=2)
    assert loop.time() - began < HANDSHAKES_S
    assert listening_on(address) == 0

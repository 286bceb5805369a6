"""Listening sockets, and errors that name the port and what it was for."""

from __future__ import annotations

import asyncio
import os
from typing import cast

import pytest

from shared.address import Address
from shared.errors import UnavailableError
from shared.listen import bound_address, listen
from shared.net.tls.contexts import server_context
from tests.shared.conftest import Credentials
from tests.shared.net.loopback import Peer
from tests.support.network import needs_ipv6

ANY = Address("127.0.0.1", 0)


class Greeting(asyncio.Protocol):
    """Says hello and closes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(b"hello")
        transport.close()


@needs_ipv6
async def test_ipv6() -> None:
    server = await listen(Address("::1", 0), Greeting, purpose="tests")
    assert str(bound_address(server)).startswith("[::1]:")
    server.close()


async def test_a_port_in_use() -> None:
    server = await listen(ANY, Greeting, purpose="tests")
    address = bound_address(server)
    with pytest.raises(UnavailableError) as caught:
        await listen(address, Greeting, purpose="admin")
    assert str(caught.value) == f"admin: cannot listen on {address}: the port is in use"
    assert isinstance(caught.value.__cause__, OSError)
    server.close()


async def test_a_port_that_several_share() -> None:
    first = await listen(ANY, Greeting, purpose="tests", shared=True)
    address = bound_address(first)
    second = await listen(address, Greeting, purpose="tests", shared=True)
    with pytest.raises(UnavailableError):
        await listen(address, Greeting, purpose="tests")
    first.close()
    peer = await Peer.connect(address.port)
    assert await peer.ended() == "FIN"
    await peer.close()
    second.close()


async def test_a_port_can_be_had_again_at_once() -> None:
    """A restart must not wait for the connections of the last run to leave TIME_WAIT."""
    server = await listen(ANY, Greeting, purpose="tests")
    address = bound_address(server)
    assert address.host == "127.0.0.1"
    peer = await Peer.connect(address.port)
    assert await peer.ended() == "FIN"
    assert peer.received == b"hello"
    await peer.close()
    server.close()
    await server.wait_closed()
    again = await listen(address, Greeting, purpose="tests")
    assert bound_address(again) == address
    again.close()


async def test_an_address_of_another_machine() -> None:
    address = Address("192.0.2.1", 0)
    with pytest.raises(UnavailableError, match=r"^health: cannot listen on 192\.0\.2\.1:0: \S.*assign"):
        await listen(address, Greeting, purpose="health")


async def test_no_such_host() -> None:
    text = r"^tunnels: cannot listen on no-such-host\.invalid:0: [A-Z][a-z ]+$"
    with pytest.raises(UnavailableError, match=text):
        await listen(Address("no-such-host.invalid", 0), Greeting, purpose="tunnels")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may have any port")
async def test_a_port_that_is_not_permitted() -> None:
    with pytest.raises(UnavailableError, match="not permitted"):
        await listen(Address("127.0.0.1", 1), Greeting, purpose="tunnels")


async def test_tls(credentials: Credentials) -> None:
    made: list[asyncio.BaseTransport] = []

    class Noting(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

    context = server_context(credentials.certificate, credentials.key)
    server = await listen(ANY, Noting, purpose="tests", tls=context)
    peer = await Peer.connect(bound_address(server).port)
    await peer.send(b"not TLS at all, not even by far")
    await peer.ended()
    assert made == []
    await peer.close()
    server.close()

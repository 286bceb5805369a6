from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared.address import Address
from shared.net.names import happy_eyeballs
from shared.net.names.endpoint import Endpoint
from shared.net.names.happy_eyeballs import connect
from tests.support.network import unanswering

PATIENCE_S = 20.0


@contextmanager
def listening(host: str, port: int = 0) -> Iterator[tuple[socket.socket, Endpoint]]:
    with socket.create_server((host, port)) as server:
        name = server.getsockname()
        yield server, (socket.AF_INET, (name[0], name[1]))


@contextmanager
def silent(host: str) -> Iterator[Endpoint]:
    """An endpoint that neither accepts nor refuses: a listener whose queue is full."""
    with unanswering(host) as port:
        yield (socket.AF_INET, (host, port))


def closed(host: str) -> Endpoint:
    with listening(host) as (_, endpoint):
        return endpoint


async def connected(*endpoints: Endpoint) -> socket.socket:
    return await asyncio.wait_for(connect(endpoints), PATIENCE_S)


async def test_one_endpoint() -> None:
    with listening("127.0.0.1") as (_, endpoint):
        sock = await connected(endpoint)
        assert sock.getpeername() == endpoint[1]
        assert sock.gettimeout() == 0.0
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        sock.close()


async def test_a_refusing_endpoint_gives_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(happy_eyeballs, "HEAD_START_S", 2 * PATIENCE_S)
    with listening("127.0.0.2") as (_, endpoint):
        sock = await connected(closed("127.0.0.1"), endpoint)
        assert sock.getpeername() == endpoint[1]
        sock.close()


async def test_a_silent_endpoint_gives_way_after_its_head_start() -> None:
    with silent("127.0.0.1") as dead, listening("127.0.0.2") as (_, endpoint):
        started = asyncio.get_running_loop().time()
        sock = await connected(dead, endpoint)
        assert sock.getpeername() == endpoint[1]
        sock.close()
        assert asyncio.get_running_loop().time() - started >= happy_eyeballs.HEAD_START_S * 0.9


async def test_cancellation_ends_all_attempts() -> None:
    with silent("127.0.0.1") as one, silent("127.0.0.2") as other:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(happy_eyeballs.HEAD_START_S * 1.5):
                await connect([one, other])
        attempts = [task for task in asyncio.all_tasks() if task.get_name().startswith("connect to")]
        await asyncio.wait_for(asyncio.gather(*attempts, return_exceptions=True), PATIENCE_S)


async def test_of_many_addresses_the_first_are_tried() -> None:
    dead = [closed(f"127.0.0.{number}") for number in range(1, happy_eyeballs.MAX_ADDRESSES + 1)]
    with listening("127.0.0.99") as (_, endpoint):
        sock = await connected(*dead[1:], endpoint)
        sock.close()
        with pytest.raises(ConnectionRefusedError):
            await connected(*dead, endpoint)


async def test_a_name_that_somebody_else_looks_up() -> None:
    with listening("127.0.0.1") as (_, endpoint):

        async def look_up(address: Address) -> list[Endpoint]:
            assert address == Address("service.example", 443)
            return [endpoint]

        sock = await happy_eyeballs.dial(Address("service.example", 443), look_up)
        assert sock.getpeername() == endpoint[1]
        sock.close()

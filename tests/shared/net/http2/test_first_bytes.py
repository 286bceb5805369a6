"""What the first bytes on a port without TLS lead to: HTTP/2, an answer that says what to do, or an end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from shared.http2 import frames
from shared.net.http2 import first_bytes
from shared.net.http2.connection import Connection
from shared.net.http2.first_bytes import FirstBytes, http1_answer
from shared.net.legs.stream import Stream
from tests.shared.http2.dialogue import (
    POST,
    PREFACE,
    data,
    headers,
    settings,
)
from tests.support.tcp_peer import TcpPeer, TcpServer

REQUEST = PREFACE + settings() + headers(1, POST) + data(1, bytes(4096))


class Port:
    """Takes connections, and remembers what became of them."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: asyncio.Queue[Stream] = asyncio.Queue()
        self.http1: list[str] = []
        self.arriving: set[FirstBytes] = set()
        self.connections: list[Connection] = []
        self.decisions: asyncio.Queue[FirstBytes] = asyncio.Queue()

    def accept(self) -> FirstBytes:
        arriving = FirstBytes(
            connection=self.make,
            answer=http1_answer("speak HTTP/2"),
            http1=self.http1.append,
            decided=self.decisions.put_nowait,
        )
        self.arriving.add(arriving)
        return arriving

    def make(self) -> Connection:
        connection = Connection(client=False, on_request=self.requests.put_nowait)
        self.connections.append(connection)
        return connection


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    port = Port()
    server = await asyncio.get_running_loop().create_server(port.accept, "127.0.0.1", 0)
    port.port = server.sockets[0].getsockname()[1]
    try:
        yield port
    finally:
        server.close()
        for connection in port.connections:
            connection.abort("the test is over")


async def within(queue: asyncio.Queue[Stream] | asyncio.Queue[FirstBytes]) -> object:
    async with asyncio.timeout(20):
        return await queue.get()


async def is_over(peer: TcpPeer) -> bool:
    """Whether it ends, one way or the other, without a byte."""
    try:
        return await peer.rest() == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("cuts", [[], [1], [2], [3], [24], [1, 2, 3, 4, 25]])
async def test_http2_is_served_however_it_comes(port: Port, cuts: Sequence[int]) -> None:
    async with TcpPeer.connected(port.port) as peer:
        for begin, end in zip([0, *cuts], [*cuts, len(REQUEST)], strict=True):
            await peer.send(REQUEST[begin:end])
            await asyncio.sleep(0)
        stream = await within(port.requests)
        assert isinstance(stream, Stream)
        assert (await peer.read(frames.HEADER_BYTES))[3] == frames.SETTINGS
    assert port.http1 == []


async def test_more_than_a_read_after_the_first_two_bytes(port: Port) -> None:
    """They are put before what a whole read brings."""
    many = b"".join(headers(number, POST) + data(number, bytes(16_000)) for number in range(1, 21, 2))
    async with TcpPeer.connected(port.port) as peer:
        await peer.send(PREFACE[:2])
        while not port.arriving:  # noqa: ASYNC110  # it is accepted in its own time
            await asyncio.sleep(0)
        await peer.send(PREFACE[2:] + settings() + many)
        for number in range(1, 21, 2):
            stream = await within(port.requests)
            assert isinstance(stream, Stream)
            assert stream.id == number


async def test_nothing_is_said_before_the_peer_has_spoken(port: Port) -> None:
    async with TcpPeer.connected(port.port) as peer:
        await peer.send(b"P")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await peer.read(1)


@pytest.mark.parametrize("method", [b"GET", b"POST", b"PUT", b"OPTIONS", b"PROPFIND"])
async def test_http1_is_told_what_to_do(port: Port, method: bytes) -> None:
    async with TcpPeer.connected(port.port) as peer:
        await peer.send(method + b" /hello HTTP/1.1\r\nhost: hello\r\nupgrade: h2c\r\n\r\n" + bytes(100_000))
        answer = await peer.rest()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 505 HTTP Version Not Supported\r\n")
        assert b"content-length: %d\r\n" % len(body) in head
        assert body == b"speak HTTP/2\n"
        assert port.http1 == [peer.address]
    assert port.connections == []


async def test_an_answer_to_head_has_no_body(port: Port) -> None:
    async with TcpPeer.connected(port.port) as peer:
        await peer.send(b"HEAD / HTTP/1.1\r\nhost: hello\r\n\r\n")
        assert (await peer.rest()).endswith(b"connection: close\r\n\r\n")


async def test_http1_that_comes_in_pieces(port: Port) -> None:
    async with TcpPeer.connected(port.port) as peer:
        for piece in (b"GET /hel", b"lo HTTP/1.1", b"\r\nhost: hello\r\n\r\n"):
            await peer.send(piece)
            await asyncio.sleep(0)
        assert (await peer.rest()).startswith(b"HTTP/1.1 505 ")


@pytest.mark.parametrize(
    "first",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",  # a ClientHello
        b"INVALID CONNECTION PREFACE\r\n\r\n",  # as h2spec has it
        b"A" * first_bytes.MAX_LINE_BYTES,
    ],
)
async def test_what_is_no_http_is_refused_by_http2(port: Port, first: bytes) -> None:
    async with TcpPeer.connected(port.port) as peer:
        await peer.send(first)
        kinds = []
        answer = await peer.rest()
        while answer:
            size = frames.HEADER_BYTES + int.from_bytes(answer[:3], "big")
            kinds.append(answer[3])
            answer = answer[size:]
        assert kinds[0] == frames.SETTINGS and kinds[-1] == frames.GOAWAY
    assert port.http1 == []


async def test_who_says_nothing_is_ended(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_bytes, "PREFACE_TIMEOUT_S", 0.05)
    async with TcpPeer.connected(port.port) as peer:
        assert await is_over(peer)
        await within(port.decisions)


async def test_a_look_whether_somebody_listens(port: Port) -> None:
    async with TcpPeer.connected(port.port) as peer:
        peer.end()
        assert await peer.rest() == b""
    await within(port.decisions)
    assert (port.http1, port.connections) == ([], [])


async def test_one_that_is_ended_by_us_is_decided(port: Port) -> None:
    async with TcpPeer.connected(port.port) as peer:
        await peer.send(b"P")
        while not port.arriving:  # noqa: ASYNC110  # it is accepted in its own time
            await asyncio.sleep(0)
        [arriving] = port.arriving
        arriving.abort()
        assert await within(port.decisions) is arriving
        assert await is_over(peer)


async def test_one_that_is_ended_before_it_has_begun(port: Port) -> None:
    arriving = port.accept()
    arriving.abort()
    assert await within(port.decisions) is arriving
    async with TcpServer.listening() as server:
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: arriving, "127.0.0.1", server.port
        )
        assert await is_over(await server.accept())
        assert transport.is_closing()

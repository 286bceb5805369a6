"""Connections through an HTTP proxy: tinyproxy, and proxies that misbehave."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.address import Address
from shared.errors import DialError
from shared.net.dial import Origin, dial_http2
from shared.net.http1 import get
from shared.net.http2.connection import Connection
from shared.net.http_proxy import MAX_HEAD_BYTES, HttpProxy
from shared.tasks import spawn
from tests.support.connect_proxy import ConnectProxy
from tests.support.http2_peer import Service
from tests.support.metadata_server import closed_port
from tests.support.network import free_port
from tests.support.tcp_peer import PATIENCE_S, TcpServer

TINYPROXY = shutil.which("tinyproxy")

needs_tinyproxy = pytest.mark.skipif(TINYPROXY is None, reason="this machine has no tinyproxy")


@asynccontextmanager
async def dialled(origin: Origin) -> AsyncIterator[Connection]:
    connection = await dial_http2(origin, PATIENCE_S, lambda: Connection(client=True))
    try:
        yield connection
    finally:
        connection.close()


def origin(proxy: Address, port: int, authorization: str = "") -> Origin:
    at = Address("127.0.0.1", port)
    return Origin("http", "127.0.0.1", at, proxy=HttpProxy(proxy, authorization))


async def refusal(proxy: Address, port: int, authorization: str = "") -> str:
    with pytest.raises(DialError) as caught:
        async with dialled(origin(proxy, port, authorization)):
            pass
    text = str(caught.value)
    assert text.startswith(f"connect to http://127.0.0.1 at 127.0.0.1:{port} by proxy {proxy}: "), text
    assert text.isprintable()
    return text.partition(f"by proxy {proxy}: ")[2]


# tinyproxy.


@pytest.fixture
def tinyproxy(tmp_path: Path) -> Iterator[Address]:
    """One that wants me:pass."""
    port, file = free_port(), tmp_path / "tinyproxy.conf"
    lines = (f"Port {port}", "Listen 127.0.0.1", "Timeout 20", "MaxClients 5", "BasicAuth me pass")
    file.write_text("\n".join(lines) + "\n")
    assert TINYPROXY is not None
    process = subprocess.Popen([TINYPROXY, "-d", "-c", file], stdout=subprocess.DEVNULL)
    try:
        yield Address("127.0.0.1", port)
    finally:
        process.kill()
        process.wait()


async def listens(address: Address) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(address.host, address.port)
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                return


@needs_tinyproxy
async def test_a_real_proxy(tinyproxy: Address) -> None:
    await listens(tinyproxy)
    right = f"Basic {base64.b64encode(b'me:pass').decode()}"
    told: list[tuple[str, str]] = []
    async with Service.listening() as service:
        connection = await dial_http2(
            origin(tinyproxy, service.port, right),
            PATIENCE_S,
            lambda: Connection(client=True),
            told=lambda *step: told.append(step),
        )
        try:
            stream = connection.open(
                [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"h"), (b":path", b"/x")]
            )
            stream.write(b"through")
            assert await (await service.request()).read(7) == b"through"
        finally:
            connection.close()
        assert told == [("proxy", f"{tinyproxy} answered 200")]
        said = await refusal(tinyproxy, service.port)
        assert said.startswith("it answered 407: it wants a user and a password")
    assert "it answered 5" in await refusal(tinyproxy, closed_port(), right)


# Others.


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n\r\n<html>", "answered 403: it does not allow 127.0.0.1:"),
        (b"HTTP/1.0 502 Bad\r\nx: y\r\n\r\n", "answered 502: it cannot reach 127.0.0.1:"),
        (b"HTTP/1.1 302 Found\r\nlocation: x\r\n\r\n", "answered 302"),
        (b"HTTP/1.1 4", "answered no HTTP/1.1; is it an HTTP proxy?"),
        (b"SSH-2.0-x\r\n\r\n", "answered no HTTP/1.1; is it an HTTP proxy?"),
        (b"HTTP/1.1 407 \r\n" + b"x" * 2 * MAX_HEAD_BYTES, "answered 407: it wants a user and a password"),
        (b"", "broke off"),
        (b"HTTP/1.1 200\r\nx: " + b"x" * 2 * MAX_HEAD_BYTES, "answered 200, but its headers are too long"),
        (b"HTTP/1.1 200\r\nx: y\r\n", "answered 200, but it broke off in its headers"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 403 No\r\n\r\n", "answered 403: it does not allow"),
        (b"HTTP/1.1 102 P\r\n\r\n" * 100, "answered 102"),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else "",
)
async def test_what_a_proxy_refuses(answer: bytes, said: str) -> None:
    async with ConnectProxy.listening(0) as proxy:
        proxy.answer = answer
        assert said in await refusal(Address("127.0.0.1", proxy.port), 443)
        (asked,) = proxy.asked
        assert asked == b"CONNECT 127.0.0.1:443 HTTP/1.1\r\nhost: 127.0.0.1:443\r\nuser-agent: hbone\r\n\r\n"


async def test_no_proxy_there() -> None:
    proxy = Address("127.0.0.1", closed_port())
    assert await refusal(proxy, 443) == "it cannot be reached: Connection refused"


async def test_a_proxy_that_says_nothing() -> None:
    async with TcpServer.listening() as silent:
        at = Origin(
            "http", "h", Address("h.example", 443), proxy=HttpProxy(Address("127.0.0.1", silent.port))
        )
        with pytest.raises(DialError, match=r"by proxy 127\.0\.0\.1:\d+: not connected within 0\.2 s"):
            await dial_http2(at, 0.2, lambda: Connection(client=True))


async def test_its_answer_in_pieces_and_the_far_side_s_first_bytes_with_it() -> None:
    """A server without TLS may speak at once: its SETTINGS must not be lost."""
    async with TcpServer.listening() as server:
        at = origin(Address("127.0.0.1", server.port), 443)
        dialling = spawn(dial_http2(at, PATIENCE_S, lambda: Connection(client=True)), name="dial")
        peer = await server.accept()
        await peer.read_until(b"\r\n\r\n")
        for piece in (b"HTT", b"P/1.1 200 OK\r\nx: y\r", b"\n\r", b"\n" + b"\0\0\0\4\0\0\0\0\0"):
            await peer.send(piece)
            await asyncio.sleep(0)
        connection = await dialling
        async with asyncio.timeout(PATIENCE_S):
            while not connection.speaks_http2:  # noqa: ASYNC110  # nobody tells when it changes
                await asyncio.sleep(0)
        connection.close()


async def test_a_request_over_http1() -> None:
    async with ConnectProxy.listening(0) as proxy:
        proxy.answer = b"HTTP/1.1 403 Forbidden\r\n\r\n"
        at = HttpProxy(Address("127.0.0.1", proxy.port))
        with pytest.raises(
            DialError, match=r"^cannot connect to h:443 by proxy .*: it answered 403: it does "
        ):
            await get("https://h/", headers={}, timeout_s=PATIENCE_S, max_bytes=1, proxy=at)


def test_a_password_is_not_shown() -> None:
    proxy = HttpProxy(Address("p", 1), "Basic c2VjcmV0")
    assert "c2VjcmV0" not in f"{proxy} {proxy!r} {Origin('https', 'h', Address('h', 443), proxy=proxy)!r}"

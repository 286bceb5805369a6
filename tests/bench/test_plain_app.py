"""The app of the plain path's bench, asked by an HTTP/1.1 client of the standard library."""

from __future__ import annotations

import http.client
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from bench.plain_app import BLOCK
from bench.subjects import free_port
from tests.support.tcp_peer import PATIENCE_S, TcpPeer


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "bench.plain_app", str(port)])
    try:
        is_open = False
        while not is_open:  # the test's timeout ends it
            assert process.poll() is None
            with suppress(ConnectionRefusedError), closing(connection_to(port)) as connection:
                connection.connect()
                is_open = True
        yield port
    finally:
        process.kill()
        process.wait()


def connection_to(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)


def test_gets_of_any_size_on_one_connection(port: int) -> None:
    with closing(connection_to(port)) as connection:
        for size in (0, 64, len(BLOCK) + 1, 5 << 20):
            connection.request("GET", f"/{size}")
            answer = connection.getresponse()
            assert (answer.status, len(answer.read())) == (200, size)


@pytest.mark.parametrize("chunked", [True, False])
def test_uploads(port: int, chunked: bool) -> None:
    body = [bytes(100_000)] * 30
    with closing(connection_to(port)) as connection:
        for _ in range(2):
            sent = iter(body) if chunked else b"".join(body)
            connection.request("POST", "/up", sent, encode_chunked=chunked)
            answer = connection.getresponse()
            assert (answer.status, len(answer.read())) == (200, 2)


async def test_it_does_not_speak_http_2(port: int) -> None:
    async with TcpPeer.connected(port) as peer:
        await peer.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert (await peer.rest()).startswith(b"HTTP/1.1 400 ")

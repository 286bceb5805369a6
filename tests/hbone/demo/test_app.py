"""The demo's app over real connections, and as the process that krun starts."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from hbone.demo.app import MAX_BODY_BYTES, Hello
from hbone.demo.processes import Process
from tests.support.metadata_server import closed_port
from tests.support.tcp_peer import PATIENCE_S


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield server.server_port
        server.shutdown()
        serving.join()


@pytest.fixture
def client(port: int) -> Iterator[http.client.HTTPConnection]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        yield connection


def test_get(client: http.client.HTTPConnection) -> None:
    for path in ("/", "/hello?x=1"):  # on one connection
        client.request("GET", path)
        response = client.getresponse()
        assert (response.status, response.version) == (200, 11)
        assert response.read() == f"hello from the app, you asked for {path}\n".encode()


@pytest.mark.parametrize("body", [b"", b"x", os.urandom(1 << 20)], ids=["nothing", "a byte", "1 MiB"])
def test_post_gives_back_what_it_got(client: http.client.HTTPConnection, body: bytes) -> None:
    client.request("POST", "/echo", body)
    response = client.getresponse()
    assert (response.status, response.read()) == (200, body)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-length": str(MAX_BODY_BYTES + 1)}, 413),
        ({"content-length": "-1"}, 411),
        ({"content-length": "many"}, 411),
        ({"content-length": "\u00b2"}, 411),
        ({"transfer-encoding": "chunked"}, 411),
    ],
    ids=["too long", "negative", "a word", "no ASCII digit", "chunked"],
)
def test_bodies_that_are_not_taken(
    client: http.client.HTTPConnection, headers: dict[str, str], status: int
) -> None:
    client.putrequest("POST", "/echo")
    for name, value in headers.items():
        client.putheader(name, value)
    client.endheaders()
    response = client.getresponse()
    assert response.status == status
    assert response.getheader("connection") == "close", "where the body ends is not known"
    response.read()


def test_as_a_process(tmp_path: Path) -> None:
    port = closed_port()
    process = Process("app", ["-m", "hbone.demo.app"], {"PORT": str(port)}, tmp_path)
    try:
        with closing(connect(port)) as sock:
            sock.sendall(b"GET /x HTTP/1.1\r\nhost: app\r\nconnection: close\r\n\r\n")
            assert sock.makefile("rb").read().endswith(b"you asked for /x\n")
    finally:
        assert process.stop() == -signal.SIGTERM
    assert (tmp_path / "app.log").read_text() == "", "the demo tells what happened"


def connect(port: int) -> socket.socket:
    """Nobody tells when the port opens, so it is tried."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        except ConnectionRefusedError:
            continue

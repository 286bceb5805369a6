"""The app at the far end, in threads of the test's own process, so that a test can choose what it does."""

from __future__ import annotations

import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Self

from shared.address import Address
from tests.support.world import PATIENCE_S

READ_BYTES = 256 << 10
"""What is read at a time, here and by the tests' own clients."""

BACKLOG = 256
"""Connections that may come at once; Python's default of 5 would make callers wait for a second SYN."""

GREETING = b"who is there?\n"

LATE_S = 2.0
"""How long a late answer takes: longer than any timer that could take the silence for an end."""

Behaviour = Callable[[socket.socket], None]
"""Serves one connection, which is closed in order after it."""


class App:
    """A TCP server whose connections `behave` serves; exchange it at any time.

    `with App(echo) as app:` listens on `app.address` until the block ends, which waits for the last
    connection and raises what a behaviour raised.
    """

    def __init__(self, behave: Behaviour) -> None:
        self.behave = behave
        self.connections = 0
        """Accepted since the start."""
        self.failures: list[BaseException] = []
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="app")
        host, port = self._server.socket.getsockname()
        self.address = Address(host, port)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if self.failures:
            raise self.failures[0]


class _Server(socketserver.ThreadingTCPServer):
    request_queue_size = BACKLOG

    def __init__(self, app: App) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self._app = app

    def finish_request(self, request: Any, client_address: object) -> None:
        self._app.connections += 1
        request.settimeout(PATIENCE_S)
        self._app.behave(request)

    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exception()
        assert error is not None
        self._app.failures.append(error)


# Behaviours.


def echo(sock: socket.socket) -> None:
    """Sends back what comes, as it comes."""
    while data := sock.recv(READ_BYTES):
        sock.sendall(data)


def greet_and_answer(sock: socket.socket) -> None:
    """Speaks first, takes one line, sends it back, and ends."""
    sock.sendall(GREETING)
    answer_lines(1)(sock)


def answer_lines(count: int) -> Behaviour:
    """Sends back each of `count` lines before it takes the next, and ends."""

    def behave(sock: socket.socket) -> None:
        with sock.makefile("rwb") as file:
            for _ in range(count):
                file.write(file.readline(READ_BYTES))
                file.flush()

    return behave


def give_back(size: int) -> Behaviour:
    """Takes `size` bytes, then sends them back, and ends without waiting for the peer's end."""

    def behave(sock: socket.socket) -> None:
        sock.sendall(read(sock, size))

    return behave


def lasting(greeting: bytes) -> Behaviour:
    """Says who it is, then echoes; does not mind how its client ends."""

    def behave(sock: socket.socket) -> None:
        try:
            sock.sendall(greeting)
            echo(sock)
        except ConnectionResetError:
            pass

    return behave


def say_back_and_look(seen: SimpleQueue[bytes | None]) -> Behaviour:
    """Sends back what comes first; `seen` is told what comes next, None for a reset."""

    def behave(sock: socket.socket) -> None:
        sock.sendall(sock.recv(100))
        try:
            seen.put(sock.recv(100))
        except ConnectionResetError:
            seen.put(None)

    return behave


def answer_late(sock: socket.socket) -> None:
    """Takes everything, is silent for LATE_S, then says what it got."""
    received = read(sock)
    threading.Event().wait(LATE_S)  # the silence itself is what is tested
    sock.sendall(b"late answer to " + received)


def read(sock: socket.socket, size: int | None = None) -> bytes:
    """`size` bytes, or what comes until the peer ends its direction."""
    received = bytearray()
    while size is None or len(received) < size:
        data = sock.recv(READ_BYTES)
        if not data:
            break
        received += data
    return bytes(received)

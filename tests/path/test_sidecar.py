"""A real Envoy as the client's sidecar: plain TCP into it, the mesh's mTLS from it to hgate."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from shared.address import Address
from tests.path.app import (
    GREETING,
    LATE_S,
    READ_BYTES,
    App,
    answer_late,
    answer_lines,
    echo,
    give_back,
    greet_and_answer,
    read,
)
from tests.path.programs import MUCH_BYTES, sidecar
from tests.support.world import INBOUNDS, PATIENCE_S, running

AT_ONCE = 50


@pytest.fixture(scope="module", params=INBOUNDS)
def entrance(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, app: App
) -> Iterator[Address]:
    """Where the client's sidecar takes plain TCP."""
    folder = tmp_path_factory.mktemp(request.param)
    with (
        running(folder, inbound=request.param, app=app.address) as world,
        sidecar(world, folder) as address,
    ):
        yield address


@contextmanager
def connected(entrance: Address) -> Iterator[socket.socket]:
    with socket.create_connection((entrance.host, entrance.port), PATIENCE_S) as client:
        yield client


def send_and_end(client: socket.socket, data: bytes) -> None:
    client.sendall(data)
    client.shutdown(socket.SHUT_WR)


def exchange(entrance: Address, data: bytes) -> bytes:
    """Sends and receives at the same time, as full-duplex clients do; returns the digest of what came."""
    with connected(entrance) as client, ThreadPoolExecutor(1) as sender:
        sending = sender.submit(send_and_end, client, data)
        received = hashlib.sha256()
        while chunk := client.recv(READ_BYTES):
            received.update(chunk)
        sending.result()
        return received.digest()


def test_64_mib_there_and_back_at_once(entrance: Address, app: App) -> None:
    app.behave = echo
    body = os.urandom(MUCH_BYTES)
    assert exchange(entrance, body) == hashlib.sha256(body).digest()


def test_64_mib_there_and_then_back_after_the_clients_end(entrance: Address, app: App) -> None:
    app.behave = lambda sock: sock.sendall(read(sock))
    body = os.urandom(MUCH_BYTES)
    assert exchange(entrance, body) == hashlib.sha256(body).digest()


def test_an_answer_long_after_the_clients_end(entrance: Address, app: App) -> None:
    app.behave = answer_late
    with connected(entrance) as client:
        send_and_end(client, b"question")
        began = time.monotonic()
        assert read(client) == b"late answer to question"
        assert time.monotonic() - began >= LATE_S


def test_the_server_talks_first(entrance: Address, app: App) -> None:
    app.behave = greet_and_answer
    with connected(entrance) as client:
        assert read(client, len(GREETING)) == GREETING
        client.sendall(b"only me\n")
        assert read(client) == b"only me\n"


def test_the_server_ends_first(entrance: Address, app: App) -> None:
    app.behave = give_back(1000)
    with connected(entrance) as client:
        client.sendall(b"x" * 1000)
        assert read(client) == b"x" * 1000
        client.shutdown(socket.SHUT_WR)


def test_fifty_at_once(entrance: Address, app: App) -> None:
    app.behave = answer_lines(2)

    def converse(number: int) -> bytes:
        line = b"%d" % number * 1000 + b"\n"
        with connected(entrance) as client:
            client.sendall(line)
            first = read(client, len(line))
            client.sendall(line)
            return first + read(client)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        heard = list(threads.map(converse, range(AT_ONCE)))
    assert heard == [(b"%d" % number * 1000 + b"\n") * 2 for number in range(AT_ONCE)]

"""OpenSSL's own client, and one of pyOpenSSL's that can end its direction only, against TCP apps."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import IO

from tests.path.app import (
    GREETING,
    LATE_S,
    App,
    answer_late,
    answer_lines,
    give_back,
    greet_and_answer,
    read,
)
from tests.path.programs import MUCH_BYTES, s_client_brings_back, through_hgate
from tests.path.tls_client import connected
from tests.support.tls_client import read_to_the_end
from tests.support.world import PATIENCE_S, World

CONVERSATIONS = 100
"""Enough that a race which loses one of twenty cannot hide."""


def test_64_mib_there_and_back(world: World, app: App, tmp_path: Path) -> None:
    app.behave = give_back(MUCH_BYTES)
    s_client_brings_back(world, tmp_path)


@contextmanager
def talking(world: World) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """s_client's input and output; its input stays open until the app has ended the connection."""
    with subprocess.Popen(through_hgate(world), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdin and client.stdout
        yield client.stdin, client.stdout
        assert client.wait(PATIENCE_S) == 0


def say(client: IO[bytes], line: bytes) -> None:
    client.write(line)
    client.flush()


def test_the_server_talks_first(world: World, app: App) -> None:
    app.behave = greet_and_answer
    with talking(world) as (into, out):
        assert out.readline() == GREETING
        say(into, b"only me\n")
        assert out.read() == b"only me\n"


def test_the_client_talks_first(world: World, app: App) -> None:
    lines = (b"Q is a command\n", b"R as well\n", b"a line like any other\n")
    app.behave = answer_lines(len(lines))
    with talking(world) as (into, out):
        for line in lines:
            say(into, line)
            assert out.readline() == line


# Half-close, which s_client cannot: it ends altogether with its input.


def test_an_answer_long_after_the_clients_end(world: World, app: App) -> None:
    app.behave = answer_late
    with connected(world) as connection:
        connection.sendall(b"question")
        connection.shutdown()
        began = time.monotonic()
        assert read_to_the_end(connection) == b"late answer to question"
        assert time.monotonic() - began >= LATE_S


def test_a_servers_first_words_are_never_lost(world: World, app: App) -> None:
    app.behave = greet_and_answer

    def conversation() -> bytes:
        with connected(world) as connection:
            connection.sendall(b"me\n")
            return read_to_the_end(connection)

    with ThreadPoolExecutor(8) as threads:
        heard = [threads.submit(conversation) for _ in range(CONVERSATIONS)]
    assert [words.result() for words in heard] == [GREETING + b"me\n"] * CONVERSATIONS


def test_much_sent_long_after_the_servers_end(world: World, app: App) -> None:
    """The other way round: the app ends its direction at once and takes what the client then sends."""
    received: SimpleQueue[bytes] = SimpleQueue()

    def end_and_read(sock: socket.socket) -> None:
        sock.sendall(GREETING)
        sock.shutdown(socket.SHUT_WR)
        received.put(read(sock))

    app.behave = end_and_read
    much = os.urandom(1 << 20)
    with connected(world) as connection:
        assert read_to_the_end(connection) == GREETING
        connection.sendall(much)
        connection.shutdown()
        assert received.get(timeout=PATIENCE_S) == much

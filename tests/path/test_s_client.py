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

import pytest

from hbone.demo.mesh import SNI
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
from tests.path.programs import MUCH_BYTES, random_file, sha256
from tests.path.tls_client import connected
from tests.support.tls_client import read_to_the_end
from tests.support.world import INBOUNDS, PATIENCE_S, World, find_program, running

CONVERSATIONS = 100
"""Enough that a race which loses one of twenty cannot hide."""


@pytest.fixture(scope="module", params=INBOUNDS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, app: App
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp(request.param)
    with running(folder, inbound=request.param, app=app.address) as world:
        yield world


def s_client(world: World) -> list[str | Path]:
    """The command: -quiet stays until the server ends, and takes Q and R in the input for what they are."""
    caller = world.caller
    return [
        *(find_program("openssl"), "s_client", "-quiet", "-verify_quiet", "-verify_return_error"),
        *("-connect", str(world.gateway), "-servername", SNI, "-verify_hostname", SNI, "-alpn", "istio"),
        *("-cert", caller.certificates, "-key", caller.key, "-CAfile", caller.roots),
    ]


def test_64_mib_there_and_back(world: World, app: App, tmp_path: Path) -> None:
    app.behave = give_back(MUCH_BYTES)
    body, answer = random_file(tmp_path / "body", MUCH_BYTES), tmp_path / "answer"
    with body.open("rb") as stdin, answer.open("wb") as stdout:
        done = subprocess.run(
            s_client(world), stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, timeout=PATIENCE_S
        )
    assert (done.returncode, done.stderr) == (0, b"")
    assert sha256(answer) == sha256(body)


@contextmanager
def talking(world: World) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """s_client's input and output; its input stays open until the app has ended the connection."""
    with subprocess.Popen(s_client(world), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
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

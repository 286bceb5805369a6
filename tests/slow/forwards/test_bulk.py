"""Much at once, and late."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.path.app import App, answer_late, read
from tests.path.programs import MUCH_BYTES
from tests.support.forwards import Forward, carry, patient_echo, started, way
from tests.support.world import PATIENCE_S, World

BODY = os.urandom(MUCH_BYTES)


@pytest.fixture(scope="module")
def forward(
    world: World, app: App, allowed: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Forward]:
    flags = ["-L", "0:ECHO", "-R", f"{allowed}:{app.address}"]
    environ = {"GCE_METADATA_HOST": world.metadata}
    with started(tmp_path_factory.mktemp("forward"), *way(world), *flags, environ=environ) as forward:
        yield forward


def test_eight_times_64_mib_there(forward: Forward) -> None:
    with ThreadPoolExecutor(8) as threads:
        digests = set(threads.map(lambda _: carry(forward.connect(), BODY), range(8)))
    assert digests == {hashlib.sha256(BODY).hexdigest()}


def test_eight_times_64_mib_by_way_of_a_port_in_the_container(forward: Forward, allowed: int) -> None:
    def one(_: int) -> str:
        return carry(socket.create_connection(("127.0.0.1", allowed), PATIENCE_S), BODY)

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(one, range(8))) == {hashlib.sha256(BODY).hexdigest()}


def test_a_late_answer_to_a_client_that_has_ended(forward: Forward, app: App) -> None:
    app.behave = answer_late
    try:
        with forward.connect() as client:
            client.sendall(b"all of it")
            client.shutdown(socket.SHUT_WR)
            assert read(client) == b"late answer to all of it"
    finally:
        app.behave = patient_echo


def test_two_hundred_by_way_of_a_port_in_the_container(forward: Forward, allowed: int) -> None:
    open_ = [socket.create_connection(("127.0.0.1", allowed), PATIENCE_S) for _ in range(200)]
    for number, sock in enumerate(open_):
        sock.sendall(b"%d\n" % number)
    assert [sock.recv(100) for sock in open_] == [b"%d\n" % number for number in range(200)]
    for sock in open_:
        sock.close()

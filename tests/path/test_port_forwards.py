"""`hbone forward` through the stand-in to a real krun, with clients that are not ours."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hbone.demo.mesh import SERVICE_URL
from shared.address import Address
from shared.cluster.service_annotations import URL
from shared.errors import EXIT_DENIED, EXIT_SIGTERM, EXIT_UNAVAILABLE
from tests.path.app import (
    READ_BYTES,
    App,
    echo,
    read,
)
from tests.path.programs import run
from tests.support.api_server import kubeconfig, threaded_api_server
from tests.support.forwards import (
    Forward,
    carry,
    connected,
    echoed,
    output_of,
    patient_echo,
    resets,
    stand_in,
    started,
    unix_app,
    way,
)
from tests.support.world import PATIENCE_S, World, find_program, free_port, running, said

BODY = os.urandom(8 << 20)
"""Of each connection, where several run at once."""


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App(patient_echo) as app:
        yield app


@pytest.fixture(scope="module")
def nobody() -> Address:
    return Address("127.0.0.1", free_port())


@pytest.fixture(scope="module")
def allowed() -> list[int]:
    """Ports that krun may listen on."""
    return [free_port() for _ in range(3)]


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, app: App, nobody: Address, allowed: list[int]
) -> Iterator[World]:
    environ = {
        "PORT_ECHO": str(app.address),
        "PORT_NOBODY": str(nobody),
        f"PORT_{app.address.port}": str(app.address),
        "HBONE_REMOTE_PORTS": ",".join(map(str, allowed)),
    }
    folder = tmp_path_factory.mktemp("forwards")
    with running(folder, inbound="none", app=app.address, environ=environ) as world:
        yield world


@pytest.fixture(autouse=True)
def token_source(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", world.metadata)


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forward")


@pytest.fixture(scope="module")
def forward(world: World, shared_folder: Path, allowed: list[int]) -> Iterator[Forward]:
    """One with all kinds of forwards, for the tests that leave it as it is."""
    target = shared_folder / "here.sock"
    flags = ["-L", "0:ECHO", "-L", f"{shared_folder}/there.sock:ECHO", "-D", "0", "-L", "0:NOBODY"]
    flags += ["-R", f"{allowed[0]}:{target}"]
    with started(
        shared_folder, *way(world), *flags, environ={"GCE_METADATA_HOST": world.metadata}
    ) as forward:
        yield forward


# -L.


def test_it_says_nothing_else(forward: Forward) -> None:
    """Such as a warning of Python's."""
    lines = [said(one) for one in list(forward._process._records)]
    assert [line for line in lines if " -> " not in line and line != "ready"] == []


def test_it_says_what_it_serves(forward: Forward, shared_folder: Path, allowed: list[int]) -> None:
    forward.says(rf"^127\.0\.0\.1:\d+ -> ECHO of {SERVICE_URL}$")
    forward.says(rf"^{shared_folder}/there.sock -> ECHO of {SERVICE_URL}$")
    forward.says(rf"^127\.0\.0\.1:\d+ -> SOCKS to {SERVICE_URL} and services by name$")
    forward.says(rf"^127\.0\.0\.1:{allowed[0]} in {SERVICE_URL} -> {shared_folder}/here.sock$")


@pytest.mark.parametrize("place", ["TCP:127.0.0.1:{port}", "UNIX-CONNECT:{folder}/there.sock"])
def test_socat(forward: Forward, shared_folder: Path, place: str) -> None:
    where = place.format(port=forward.port(), folder=shared_folder)
    done = run(find_program("socat"), "-t", "20", "-", where, stdin=b"by way of socat")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"by way of socat", b"")


def test_only_its_owner_may_open_a_unix_socket(forward: Forward, shared_folder: Path) -> None:
    mode = (shared_folder / "there.sock").stat().st_mode
    assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)


def test_eight_transfers_at_once(forward: Forward) -> None:
    with ThreadPoolExecutor(8) as threads:
        digests = set(threads.map(lambda _: carry(forward.connect(), BODY), range(8)))
    assert digests == {hashlib.sha256(BODY).hexdigest()}


def test_two_hundred_connections_at_once(forward: Forward) -> None:
    open_ = [forward.connect() for _ in range(200)]
    for number, sock in enumerate(open_):
        sock.sendall(b"%d\n" % number)
    assert [sock.recv(100) for sock in open_] == [b"%d\n" % number for number in range(200)]
    for sock in open_:
        sock.close()


def test_a_target_that_ends_first(forward: Forward, app: App) -> None:
    heard: list[bytes] = []
    done = threading.Event()

    def end_and_listen(sock: socket.socket) -> None:
        sock.sendall(b"that was all")
        sock.shutdown(socket.SHUT_WR)
        heard.append(read(sock))
        done.set()

    app.behave = end_and_listen
    try:
        with forward.connect() as client:
            assert read(client) == b"that was all"
            client.sendall(b"not from here")
        assert done.wait(PATIENCE_S)
        assert heard == [b"not from here"]
    finally:
        app.behave = patient_echo


def test_a_target_that_does_not_listen(forward: Forward, nobody: Address) -> None:
    resets(forward.port(1))
    forward.says(
        rf"NOBODY of {SERVICE_URL}: not opened: answered 503: connect to {nobody}: connection refused"
    )


# How it starts, and ends.


@pytest.mark.parametrize(
    ("flags", "code", "line"),
    [
        (
            ["-L", "0:NOTHING"],
            EXIT_UNAVAILABLE,
            rf"NOTHING of {SERVICE_URL}: answered 404: no such target; known are",
        ),
        (["-L", "0:ECHO", "--audience", "https://other.a.run.app"], EXIT_DENIED, "answered 401: "),
        (
            ["-R", "1:80"],
            EXIT_DENIED,
            "answered 403: port 1 may not be listened on: HBONE_REMOTE_PORTS of krun",
        ),
    ],
)
def test_what_fails_at_the_start_ends_it(world: World, flags: list[str], code: int, line: str) -> None:
    done = output_of(*way(world), *flags)
    assert (done.returncode, done.stdout) == (code, b"")
    (said_,) = [text for text in done.stderr.decode().splitlines() if text.startswith("hbone: ")]
    assert re.search(line, said_)


def test_a_service_that_is_not_there(world: World, nobody: Address) -> None:
    arguments = [SERVICE_URL, "--ca", world.front_end_ca, "--connect", nobody, "-L", "0:ECHO"]
    done = output_of(*arguments)
    assert done.returncode == EXIT_UNAVAILABLE
    assert done.stderr.decode() == f"hbone: connect to {SERVICE_URL} at {nobody}: connection refused\n"


def test_a_port_that_is_taken(world: World, app: App) -> None:
    done = output_of(*way(world), "-L", f"{app.address.port}:ECHO")
    assert done.returncode == EXIT_UNAVAILABLE
    assert done.stderr.decode() == f"hbone: forward: cannot listen on {app.address}: the port is in use\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, EXIT_SIGTERM)])
def test_a_signal_lets_connections_finish(
    world: World, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    path = tmp_path / "a.sock"
    with started(tmp_path, *way(world), "-L", "0:ECHO", "-L", f"{path}:ECHO") as forward:
        with forward.connect() as client:
            client.sendall(b"before")
            assert client.recv(100) == b"before"
            forward.signal(number)
            while path.exists():
                pass  # it is removed when nothing more is accepted
            client.sendall(b"after")
            assert client.recv(100) == b"after"
        assert forward.ended() == code


def test_two_signals_end_it_at_once(world: World, tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    flags = ["-L", "0:ECHO", "-L", f"{path}:ECHO"]
    with started(tmp_path, *way(world), *flags) as forward, forward.connect() as client:
        client.sendall(b"before")
        assert client.recv(100) == b"before"
        forward.signal(signal.SIGTERM)
        while path.exists():
            pass
        forward.signal(signal.SIGTERM)
        assert forward.ended() == EXIT_SIGTERM
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_a_quiet_one_says_nothing(world: World, tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    arguments = [sys.executable, "-m", "hbone", "forward", *map(str, way(world)), "-q", "-L", f"{path}:ECHO"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE) as process:
        try:
            client = connected(path)
            with client:
                client.sendall(b"hello")
                assert client.recv(100) == b"hello"
        finally:
            process.terminate()
        assert process.stderr is not None
        assert process.stderr.read() == b""


# -R.


def test_a_port_in_the_container(forward: Forward, shared_folder: Path, allowed: list[int]) -> None:
    with unix_app(shared_folder / "here.sock", echo), ThreadPoolExecutor(8) as threads:
        where = ("127.0.0.1", allowed[0])
        digests = set(
            threads.map(lambda _: carry(socket.create_connection(where, PATIENCE_S), BODY), range(8))
        )
    assert digests == {hashlib.sha256(BODY).hexdigest()}


def test_nobody_at_the_target_of_a_port_in_the_container(
    forward: Forward, shared_folder: Path, allowed: list[int]
) -> None:
    resets(allowed[0])
    forward.says(rf"{shared_folder}/here.sock: not connected for 127.0.0.1:{allowed[0]} in .*: connect to ")


def test_a_port_has_one_owner(world: World, tmp_path: Path, app: App, allowed: list[int]) -> None:
    port = allowed[1]
    flags = ["-R", f"{port}:{app.address.port}"]
    with started(tmp_path, *way(world), *flags):
        done = output_of(*way(world), *flags)
        assert done.returncode == EXIT_UNAVAILABLE
        cause = f"cannot listen on 127.0.0.1:{port}: the port is in use by another hbone forward"
        assert f"answered 409: {cause}" in done.stderr.decode()
        assert echoed(port)
    with started(tmp_path, *way(world), *flags):  # it is free again
        assert echoed(port)


# -D.


def answer(sock: socket.socket) -> None:
    """As a web server."""
    while not sock.recv(READ_BYTES).endswith(b"\r\n\r\n"):
        pass
    sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nby socks\n")


@pytest.mark.parametrize("flag", ["--socks5-hostname", "--socks4a", "--socks5"])
def test_curl_by_socks(forward: Forward, app: App, flag: str) -> None:
    app.behave = answer
    try:
        url = f"http://localhost:{app.address.port}/"
        done = run(find_program("curl"), "-sS", "-4", flag, f"127.0.0.1:{forward.port(2)}", url)
    finally:
        app.behave = patient_echo
    assert (done.returncode, done.stdout, done.stderr) == (0, b"by socks\n", b"")


@pytest.mark.parametrize("name", ["other.demo", "other.demo.svc.cluster.local"])
def test_another_service_by_its_name_in_the_mesh(world: World, app: App, tmp_path: Path, name: str) -> None:
    """The cluster says where it is: at a front end of its own."""
    front_end = Address("127.0.0.1", free_port())
    annotated = {
        "name": "other",
        "namespace": "demo",
        "annotations": {URL: f"https://localhost:{front_end.port}"},
    }
    with threaded_api_server() as cluster, stand_in(world, tmp_path, front_end):
        cluster.answer = lambda asked: (
            (200, json.dumps({"metadata": annotated}).encode())
            if asked.path == "/api/v1/namespaces/demo/services/other"
            else None
        )
        (tmp_path / "kubeconfig").write_text(kubeconfig(cluster))
        environ = {"KUBECONFIG": str(tmp_path / "kubeconfig"), "HBONE_CACHE": "none"}
        flags = ["--no-token", "--ca", tmp_path / "run" / "ca.pem", "--connect", front_end, "-D", "0"]
        app.behave = answer
        try:
            with started(tmp_path, SERVICE_URL, *flags, environ=environ) as forward:
                socks, url = f"127.0.0.1:{forward.port()}", f"http://{name}:{app.address.port}/"
                done = run(find_program("curl"), "-sS", "--socks5-hostname", socks, url)
        finally:
            app.behave = patient_echo
    assert (done.returncode, done.stdout, done.stderr) == (0, b"by socks\n", b"")


@pytest.mark.parametrize(
    ("url", "reply", "line"),
    [
        ("http://localhost:1/", 5, "1 of .*: not opened: answered 404: no such target"),
        ("http://www.example.com/", 2, "SOCKS to www.example.com:80: not opened: no name of a service"),
        ("http://192.0.2.1/", 2, "SOCKS to 192.0.2.1:80: not opened: an address is no service"),
    ],
)
def test_what_socks_does_not_reach(forward: Forward, url: str, reply: int, line: str) -> None:
    done = run(find_program("curl"), "-sS", "--socks5-hostname", f"127.0.0.1:{forward.port(2)}", url)
    assert done.returncode == 97
    assert f"({reply})".encode() in done.stderr
    forward.says(line)

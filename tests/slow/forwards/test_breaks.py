"""Each hop of a forward goes away in the middle: what the user reads, and that it works again by itself."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from hbone.demo.mesh import SERVICE_URL
from shared.address import Address
from tests.path.app import App
from tests.path.krun_peers import krun
from tests.support.cut_line import line_to
from tests.support.forwards import Forward, echoed, resets, stand_in, started
from tests.support.world import PATIENCE_S, World, free_port, said

HOST = SERVICE_URL.removeprefix("https://")


def works(forward: Forward) -> None:
    """Holds that a new connection gets through."""
    with forward.connect() as client:
        client.sendall(b"again")
        assert client.recv(100) == b"again"


def test_a_front_end_that_goes_and_comes_back(world: World, tmp_path: Path) -> None:
    address = Address("127.0.0.1", free_port())
    flags = [SERVICE_URL, "--no-token", "--ca", tmp_path / "run" / "ca.pem", "--connect", address]
    with ExitStack() as block:
        front_end = block.enter_context(stand_in(world, tmp_path, address))
        forward = block.enter_context(started(tmp_path, *flags, "-L", "0:ECHO"))
        client = block.enter_context(forward.connect())
        client.sendall(b"hello")
        assert client.recv(100) == b"hello"
        front_end._process.kill()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        forward.says(rf"ECHO of {SERVICE_URL}: ended after .* s: the connection broke; has the container")
        resets(forward.port())
        forward.says(rf"ECHO of {SERVICE_URL}: not opened: connect to .*: connection refused")
        block.enter_context(stand_in(world, tmp_path, address))
        forward.says(rf"{SERVICE_URL} works again")
        works(forward)


def test_a_container_that_goes_and_comes_back(app: App, tmp_path: Path) -> None:
    told = {"HBONE_LISTEN": f"127.0.0.1:{free_port()}", "PORT_ECHO": str(app.address)}
    url = f"http://{told['HBONE_LISTEN']}"
    (tmp_path / "first").mkdir()
    with ExitStack() as block:
        first = block.enter_context(ExitStack())
        first.enter_context(krun(tmp_path / "first", HBONE_DRAIN_TIMEOUT="0.1", **told))
        forward = block.enter_context(started(tmp_path, url, "-L", "0:ECHO"))
        client = block.enter_context(forward.connect())
        client.sendall(b"hello")
        assert client.recv(100) == b"hello"
        first.close()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        forward.says(rf"ECHO of {url}: ended after .* s: the container is stopping")
        block.enter_context(krun(tmp_path, **told))
        works_in_time(forward)


def works_in_time(forward: Forward) -> None:
    """Holds that new connections get through before long."""
    while True:
        try:
            if echoed(forward.port()):
                return
        except ConnectionResetError:
            continue


def test_a_line_that_drops_everything(world: World, tmp_path: Path) -> None:
    with line_to(world.front_end) as line:
        flags = [SERVICE_URL, "--keepalive", "0.5", "--ca", world.front_end_ca, "--connect", line.address]
        with started(tmp_path, *flags, "-L", "0:ECHO") as forward, forward.connect() as client:
            client.sendall(b"hello")
            assert client.recv(100) == b"hello"
            line.cut()
            with pytest.raises(ConnectionResetError):
                client.recv(1)
            forward.says(
                rf"ECHO of {SERVICE_URL}: ended after .* s: no answer from {HOST} for .* s; is the line down"
            )
            works(forward)


def test_one_that_keeps_trying(world: World, tmp_path: Path) -> None:
    address = Address("127.0.0.1", free_port())
    flags = [
        SERVICE_URL,
        "--no-token",
        "--connect",
        address,
        "--keep-trying",
        "--ca",
        tmp_path / "run" / "ca.pem",
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ca.pem").write_bytes(world.front_end_ca.read_bytes())
    with started(tmp_path, *flags, "-L", "0:ECHO") as forward:
        forward.says(rf"^connect to {SERVICE_URL} at .*: connection refused$")
        with stand_in(world, tmp_path, address):
            forward.says(rf"{SERVICE_URL} works again")
            works(forward)
            forward.says(rf"ECHO of {SERVICE_URL} works again")


def test_a_port_outlives_the_request_timeout(world: World, tmp_path: Path, app: App, allowed: int) -> None:
    address, port = Address("127.0.0.1", free_port()), allowed
    flags = [SERVICE_URL, "--no-token", "--ca", tmp_path / "run" / "ca.pem", "--connect", address]
    with (
        stand_in(world, tmp_path, address, "--timeout", "1"),
        started(tmp_path, *flags, "-R", f"{port}:{app.address}") as forward,
    ):
        forward.says(rf"127.0.0.1:{port} in {SERVICE_URL}: ended after 1.\d s: ")
        forward.says(rf"127.0.0.1:{port} in {SERVICE_URL} works again")
        assert echoed(port)


def test_a_container_that_drains_lets_connections_by_its_ports_finish(
    app: App, tmp_path: Path, allowed: int
) -> None:
    listen, port = f"127.0.0.1:{free_port()}", free_port()
    (tmp_path / "krun").mkdir()
    with ExitStack() as block:
        container = block.enter_context(ExitStack())
        process, _ = container.enter_context(
            krun(tmp_path / "krun", HBONE_LISTEN=listen, HBONE_REMOTE_PORTS=str(port))
        )
        forward = block.enter_context(started(tmp_path, f"http://{listen}", "-R", f"{port}:{app.address}"))
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client:
            client.sendall(b"before")
            assert client.recv(100) == b"before"
            process._process.terminate()
            process.wait_for(lambda record: said(record).startswith("draining: "), PATIENCE_S)
            client.sendall(b"after")
            assert client.recv(100) == b"after"
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        forward.says(rf"127.0.0.1:{port} in http://{listen}: ended after .* s: krun gave the port up")

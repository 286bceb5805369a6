"""`hbone forward` as a process, and what is sent through it."""

from __future__ import annotations

import contextlib
import hashlib
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from hbone.demo.mesh import SERVICE_URL
from hbone.demo.processes import Process
from shared.address import Address
from tests.path.app import READ_BYTES, echo
from tests.path.programs import run
from tests.support.world import PATIENCE_S, World, printed, said


class Forward:
    """A running `hbone forward`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def says(self, pattern: str) -> re.Match[str]:
        """Waits for a line that has `pattern`."""
        found = self._process.wait_for(
            lambda record: re.search(pattern, said(record)) is not None, PATIENCE_S
        )
        match = re.search(pattern, said(found))
        assert match is not None
        return match

    def port(self, number: int = 0) -> int:
        """Where it listens on a port that it has chosen; `number` counts the flags."""
        lines = [said(one) for one in list(self._process._records)]
        places = [line for line in lines if re.match(r"127\.0\.0\.1:\d+ ->", line)]
        return int(places[number].partition(" ")[0].rpartition(":")[2])

    def connect(self, number: int = 0) -> socket.socket:
        """A connection to that port."""
        return socket.create_connection(("127.0.0.1", self.port(number)), PATIENCE_S)

    def signal(self, number: signal.Signals) -> None:
        self._process._process.send_signal(number)

    def ended(self) -> int:
        """Waits for its end by itself: another signal would kill it when it has nearly ended."""
        return self._process._process.wait(PATIENCE_S)

    def stop(self) -> int:
        return self._process.stop()


@contextmanager
def started(folder: Path, *arguments: object, environ: dict[str, str] | None = None) -> Iterator[Forward]:
    """`hbone forward ARGUMENTS` until the block ends, as soon as it is ready."""
    process = Process("forward", ["-m", "hbone", "forward", *map(str, arguments)], environ or {}, folder)
    forward = Forward(process)
    try:
        forward.says(r"ready$")
        yield forward
    finally:
        process.stop()


def output_of(*arguments: object) -> subprocess.CompletedProcess[bytes]:
    return run(sys.executable, "-m", "hbone", "forward", *map(str, arguments))


def patient_echo(sock: socket.socket) -> None:
    """Does not mind how its client ends."""
    with contextlib.suppress(ConnectionResetError):
        echo(sock)


def carry(sock: socket.socket, body: bytes) -> str:
    """The digest of what an echo sends back."""
    digest = hashlib.sha256()

    def collect() -> None:
        while data := sock.recv(READ_BYTES):
            digest.update(data)

    with sock, ThreadPoolExecutor(1) as threads:
        collecting = threads.submit(collect)
        sock.sendall(body)
        sock.shutdown(socket.SHUT_WR)
        collecting.result(PATIENCE_S)
    return digest.hexdigest()


def connected(path: Path) -> socket.socket:
    """A connection to a socket that is about to be there."""
    while True:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(PATIENCE_S)
        try:
            client.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            client.close()
        else:
            return client


def resets(port: int) -> None:
    """Holds that a connection to a port of loopback is reset, be it while it is made."""
    with (
        pytest.raises(ConnectionResetError),
        socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client,
    ):
        client.recv(1)


def echoed(port: int) -> bool:
    """Whether a port in the container leads to an echo."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client:
        client.sendall(b"hello")
        return client.recv(100) == b"hello"


@contextmanager
def unix_app(path: Path, behave: Callable[[socket.socket], None]) -> Iterator[None]:
    """An app on a unix socket."""

    def serve_one(sock: socket.socket) -> None:
        with sock:
            behave(sock)

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve_one, args=(sock,), daemon=True).start()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(256)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            path.unlink()


@contextmanager
def stand_in(world: World, folder: Path, address: Address, *flags: str) -> Iterator[Process]:
    """A front end that asks for no token."""
    arguments = ["-m", "hbone", "cloudrun", "--allow-unauthenticated", "--listen", str(address), *flags]
    arguments += [
        "--metadata",
        "127.0.0.1:0",
        "--dir",
        str(folder / "run"),
        "--container",
        str(world.container),
    ]
    process = Process("cloudrun", arguments, {}, folder)
    try:
        printed(process, "CLOUDRUN_ADDRESS")
        yield process
    finally:
        process.stop()


def way(world: World) -> list[object]:
    """The service, and how it is reached."""
    return [SERVICE_URL, "--ca", world.front_end_ca, "--connect", world.front_end]

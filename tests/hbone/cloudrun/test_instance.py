"""An instance that is started by the first request: how it comes, what keeps it from coming, its end."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hbone.cloudrun.instance import Instance
from shared.address import Address
from shared.errors import UnavailableError
from tests.support.network import free_port
from tests.support.tcp_peer import PATIENCE_S, TcpPeer

_LISTENS = """
import os, socket, sys, time
file, port = sys.argv[1:]
open(file, "a").write("%d\\n" % os.getpid())
while not os.path.exists(file + ".go"):
    time.sleep(0.01)
with socket.create_server(("127.0.0.1", int(port))) as server:
    while True:
        server.accept()
"""


class Asleep:
    """An instance, the file with the process ids of its starts, and the port that it listens on."""

    def __init__(self, folder: Path) -> None:
        self.starts = folder / "starts"
        self.port = free_port()
        command = [sys.executable, "-c", _LISTENS, str(self.starts), str(self.port)]
        self.instance = Instance(command, Address("127.0.0.1", self.port))

    @property
    def pids(self) -> list[int]:
        return [int(line) for line in self.starts.read_text().splitlines()]

    def let_it_listen(self) -> None:
        self.starts.with_name("starts.go").touch()


@asynccontextmanager
async def asleep(folder: Path) -> AsyncIterator[Asleep]:
    one = Asleep(folder)
    try:
        yield one
    finally:
        await one.instance.close()


async def test_many_requests_start_it_once(tmp_path: Path) -> None:
    async with asleep(tmp_path) as one:
        assert not one.instance.is_there
        one.let_it_listen()
        await asyncio.gather(*(one.instance.ready(PATIENCE_S) for _ in range(10)))
        assert one.instance.is_there
        assert len(one.pids) == 1
        peer = await TcpPeer.connect(one.port)
        peer.reset()


async def test_a_request_that_is_not_held_longer(tmp_path: Path) -> None:
    """The start goes on without it."""
    async with asleep(tmp_path) as one:
        with pytest.raises(TimeoutError):
            await one.instance.ready(0.01)
        one.let_it_listen()
        await one.instance.ready(PATIENCE_S)
        assert len(one.pids) == 1


async def test_an_instance_that_has_ended_is_started_again(tmp_path: Path) -> None:
    async with asleep(tmp_path) as one:
        one.let_it_listen()
        await one.instance.ready(PATIENCE_S)
        process = one.instance._process
        assert process is not None
        process.send_signal(signal.SIGKILL)
        await process.wait()
        assert not one.instance.is_there
        await one.instance.ready(PATIENCE_S)
        assert len(one.pids) == 2


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["/nowhere/krun"], "--start /nowhere/krun: No such file"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "has ended with exit code 3 before it listened"),
    ],
)
async def test_what_does_not_start(command: list[str], why: str) -> None:
    instance = Instance(command, Address("127.0.0.1", free_port()))
    with pytest.raises(UnavailableError, match=why):
        await instance.ready(PATIENCE_S)


async def test_an_end_before_the_first_request() -> None:
    await Instance(["krun"], Address("127.0.0.1", 1)).close()

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from hbone.forward import unix_sockets
from shared.errors import DialError, UnavailableError
from shared.net.legs.tcp import TcpLeg
from tests.support.tcp_peer import PATIENCE_S


def made(server: asyncio.Server, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    unix_sockets.remove(path, server)
    assert not path.exists()


async def test_its_mode_and_its_end(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made(await unix_sockets.listen(tmp_path / "a.sock", TcpLeg), tmp_path / "a.sock")
        assert os.umask(0) == 0  # as it was
    finally:
        os.umask(before)


async def test_the_socket_of_a_process_that_is_gone_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    made(await unix_sockets.listen(path, TcpLeg), path)


async def test_the_socket_of_one_that_lives_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(path))
        alive.listen()
        with pytest.raises(UnavailableError) as raised:
            await unix_sockets.listen(path, TcpLeg)
        assert str(raised.value) == f"cannot listen on {path}: another process listens on it"
        assert path.exists()


def _file(path: Path) -> None:
    path.write_text("precious")


def _link(path: Path) -> None:
    path.with_name("target").write_text("precious")
    path.symlink_to(path.with_name("target"))


@pytest.mark.parametrize("put", [_file, _link, Path.mkdir])
async def test_what_is_no_socket_stays(tmp_path: Path, put: Callable[[Path], None]) -> None:
    path = tmp_path / "a.sock"
    put(path)
    with pytest.raises(UnavailableError, match=r"cannot listen on .*: there is a file that is no socket$"):
        await unix_sockets.listen(path, TcpLeg)
    assert path.exists()


async def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"No such file or directory$"):
        await unix_sockets.listen(tmp_path / "none" / "a.sock", TcpLeg)


async def test_a_dial(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        leg = await unix_sockets.dial(path)
        sock, _ = listener.accept()
        with sock:
            leg.write(b"hello")
            leg.write_eof()
            sock.settimeout(PATIENCE_S)
            assert await asyncio.to_thread(sock.recv, 100) == b"hello"
            assert await asyncio.to_thread(sock.recv, 100) == b""
        leg.close()
    with pytest.raises(DialError, match=r"^connect to .*a\.sock: connection refused$"):
        await unix_sockets.dial(path)
    with pytest.raises(DialError, match=r"none\.sock: No such file or directory$"):
        await unix_sockets.dial(tmp_path / "none.sock")


async def test_a_listener_that_accepts_nobody(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with pytest.raises(DialError, match=r"its queue is full$"):
            for _ in range(10):
                (await unix_sockets.dial(path)).abort()

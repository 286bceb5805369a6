"""Pipes, sockets, terminals and files by their descriptors, as a process finds them at 0 and 1."""

from __future__ import annotations

import asyncio
import os
import pty
import socket
import tty
from contextlib import suppress
from pathlib import Path

from tests.support.tcp_peer import PATIENCE_S


class Descriptors:
    """Opens descriptors and closes them all at the end."""

    def __init__(self) -> None:
        self._open: list[int] = []

    def pipe(self) -> tuple[int, int]:
        """(read, write)."""
        return self.keep(*os.pipe())

    def sockets(self) -> tuple[int, int]:
        """Two ends of one connection."""
        one, other = socket.socketpair()
        return self.keep(one.detach(), other.detach())

    def terminal(self) -> tuple[int, int]:
        """(the person's end, the command's end), which passes bytes as they are."""
        master, slave = pty.openpty()
        tty.setraw(slave)
        return self.keep(master, slave)

    def file(self, path: str | Path, flags: int = os.O_RDONLY) -> int:
        fd = os.open(path, flags, 0o600)
        self._open.append(fd)
        return fd

    def copy(self, fd: int) -> int:
        return self.keep(os.dup(fd), -1)[0]

    def keep(self, one: int, other: int) -> tuple[int, int]:
        self._open += [one, other]
        return one, other

    def close(self, fd: int) -> None:
        self._open.remove(fd)
        os.close(fd)

    def close_all(self) -> None:
        for fd in self._open:
            with suppress(OSError):
                os.close(fd)


async def read(fd: int, count: int) -> bytes:
    """Exactly `count` bytes, fewer only if the end comes before."""
    os.set_blocking(fd, False)
    data = bytearray()
    while len(data) < count:
        try:
            part = os.read(fd, count - len(data))
        except BlockingIOError:
            await readable(fd)
            continue
        if not part:
            break
        data += part
    return bytes(data)


async def readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await ready.wait()
    finally:
        loop.remove_reader(fd)

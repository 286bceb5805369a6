"""Unix sockets: one to listen on that only its owner may open, and one to connect to."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from shared.errors import DialError, UnavailableError
from shared.listen import BACKLOG
from shared.net.dial import reason
from shared.net.legs.tcp import TcpLeg

OWNER_ONLY = 0o177
"""What the mode of a socket lacks: 0600 is left."""


async def listen(path: Path, factory: Callable[[], asyncio.BaseProtocol]) -> asyncio.Server:
    """Accepts connections on `path`, each given to a protocol of `factory`. A socket that nobody listens on
    any more is replaced; anything else that is there stays.

    Raises:
        UnavailableError: nobody can listen there; the text says why.
    """
    sock = _bound(path)
    try:
        return await asyncio.get_running_loop().create_unix_server(factory, sock=sock, backlog=BACKLOG)
    except OSError as error:
        sock.close()
        raise _unavailable(path, error.strerror or str(error)) from error


def remove(path: Path, server: asyncio.Server) -> None:
    """Removes the socket of `server`, which is to be closed, unless somebody has replaced it."""
    with contextlib.suppress(OSError):
        server.close()
        path.unlink()


async def dial(path: Path) -> TcpLeg:
    """Connects to `path`: the kernel does that at once. Raises DialError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(os.fspath(path))
        _, leg = await asyncio.get_running_loop().create_unix_connection(TcpLeg, sock=sock)
        return leg
    except OSError as error:
        sock.close()
        cause = "its queue is full" if isinstance(error, BlockingIOError) else reason(error)
        raise DialError(f"connect to {path}: {cause}") from error


def _bound(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            _bind(sock, path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _remove_dead(path)
            _bind(sock, path)
    except OSError as error:
        sock.close()
        raise _unavailable(path, error.strerror or str(error)) from error
    except UnavailableError:
        sock.close()
        raise
    return sock


def _bind(sock: socket.socket, path: Path) -> None:
    # The mode that a socket has from its first moment on; a chmod would come too late.
    before = os.umask(OWNER_ONLY)
    try:
        sock.bind(os.fspath(path))
    finally:
        os.umask(before)


def _remove_dead(path: Path) -> None:
    """Removes the socket of a process that is gone. Raises UnavailableError if it is something else."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise _unavailable(path, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
        asked.setblocking(False)
        if asked.connect_ex(os.fspath(path)) != errno.ECONNREFUSED:
            raise _unavailable(path, "another process listens on it")
    path.unlink()


def _unavailable(path: Path, cause: str) -> UnavailableError:
    return UnavailableError(f"cannot listen on {path}: {cause}")

"""The stock of pipes that spliced connections borrow: splice(2) moves bytes only into or out of a pipe.

A pipe counts against the kernel's limit of pipe memory per user with its whole size, empty or not (pipe(7),
pipe-user-pages-soft: 64 MiB), and costs two descriptors. So none is kept for a connection that is idle.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

PIPE_BYTES = 1 << 20
"""A pipe's size, and the most that an ordinary user may ask for (pipe-max-size). A pipe has a slot for each
page of its size, and each piece of a packet takes one: from a network card the default of 64 KiB holds 16
packets."""

LEAST_BYTES = 64 << 10
"""A smaller pipe moves less at a time than a copy does. The kernel gives 8 KiB where a user has used up its
pipe-user-pages-soft."""

SPARE_PIPES = 16
"""Empty ones that are kept: as many as connections are likely to be stalled at the same moment."""


class Pipe:
    """A pipe, with the number of bytes in it."""

    __slots__ = ("bytes", "read_end", "write_end")

    def __init__(self) -> None:
        """Raises OSError if there is no descriptor or no memory for one."""
        self.read_end, self.write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.bytes = 0
        wanted = PIPE_BYTES
        while wanted > LEAST_BYTES:
            with contextlib.suppress(OSError):  # EPERM: over this machine's or this user's limit
                fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, wanted)
                return
            wanted //= 2

    @property
    def size(self) -> int:
        """In bytes."""
        return fcntl.fcntl(self.write_end, fcntl.F_GETPIPE_SZ)

    def close(self) -> None:
        """Drops it with what is in it."""
        os.close(self.read_end)
        os.close(self.write_end)


class Pipes:
    """Up to `most` pipes, lent and spare ones together."""

    __slots__ = ("_lent", "_spare", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self._lent = 0
        self._spare: list[Pipe] = []

    @property
    def lent(self) -> int:
        """Pipes that hold bytes of a connection now."""
        return self._lent

    def lend(self) -> Pipe | None:
        """An empty pipe; None if all are lent, or the kernel gives no useful one."""
        if self._spare:
            self._lent += 1
            return self._spare.pop()
        if self._lent >= self.most:
            return None
        try:
            pipe = Pipe()
        except OSError:  # EMFILE, ENFILE
            return None
        if pipe.size < LEAST_BYTES:
            pipe.close()
            return None
        self._lent += 1
        return pipe

    def give_back(self, pipe: Pipe) -> None:
        """Takes back what `lend` gave; bytes that are still in it are dropped."""
        self._lent -= 1
        if pipe.bytes or len(self._spare) >= SPARE_PIPES:
            pipe.close()
        else:
            self._spare.append(pipe)

    def close(self) -> None:
        """Closes the spare ones."""
        while self._spare:
            self._spare.pop().close()

"""A TCP line that a test cuts: from then on everything is dropped on what is open, and nobody is told.

The connections stay open at both ends, as with a laptop that has changed its network, or a NAT that has
forgotten: no FIN, no RST. Connections that are made after that pass.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shared.address import Address

CHUNK_BYTES = 64 << 10


class CutLine:
    """Made by `line_to`."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._cut = threading.Event()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._listener.getsockname())

    def cut(self) -> None:
        """Drops whatever comes from now on, on the connections that are open."""
        self._cut.set()
        self._cut = threading.Event()

    def accept(self) -> None:
        """Takes connections until `close`."""
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._target.host, self._target.port))
                self._open += near, far
                for source, sink in ((near, far), (far, near)):
                    passing = threading.Thread(target=_pass_on, args=(source, sink, self._cut), daemon=True)
                    passing.start()

    def close(self) -> None:
        """Ends all connections."""
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def _pass_on(source: socket.socket, sink: socket.socket, cut: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            if not cut.is_set():
                sink.sendall(data)
        if not cut.is_set():
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def line_to(target: Address) -> Iterator[CutLine]:
    """A line to `target` until the block ends."""
    line = CutLine(target)
    accepting = threading.Thread(target=line.accept, daemon=True)
    accepting.start()
    try:
        yield line
    finally:
        line.close()
        accepting.join()

"""Standard input and output as one end of a tunnel (rules in `shared/net/legs.py`).

ssh gives a ProxyCommand two pipes, or one socket; a shell gives files and terminals. What the event loop
cannot watch (files) is always ready. Nothing but the tunnel's bytes ever goes to standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat

from shared.errors import StreamResetError
from shared.net.legs import Buffer, RelayEnd
from shared.net.read_buffer import READ_BYTES
from shared.wire.frames import CANCEL

FULL_BYTES = 256 << 10
"""Unwritten bytes beyond which the tunnel is told to wait: the same as for an HTTP/2 connection."""


class StdioLeg:
    """File descriptors 0 and 1 as a leg."""

    def __init__(self, input_fd: int = 0, output_fd: int = 1) -> None:
        self._in = input_fd
        self._out = output_fd
        self._loop = asyncio.get_running_loop()
        self._relay: RelayEnd | None = None
        self._waiting = bytearray()
        self._reading = False
        self._paused = False
        self._input_ended = False
        self._end_pending = False
        self._full = False
        self._output_over = False
        self._writing = False
        self._in_is_file = _is_file(input_fd)
        # A write that does not fit must not stop the loop. What is shared with a terminal or a shell stays
        # as it was found; those never take more than a moment.
        self._restore_blocking = _is_stream(output_fd) and os.get_blocking(output_fd)
        if self._restore_blocking:
            os.set_blocking(output_fd, False)

    # Leg.

    def join(self, relay: RelayEnd) -> None:
        self._relay = relay
        self._read_more()

    def write(self, data: Buffer) -> None:
        if self._output_over:
            return
        self._waiting += data
        if not self._writing:
            self._write()

    def write_eof(self) -> None:
        self._end_pending = True
        if not self._waiting:
            self._end_output()

    def pause_reading(self) -> None:
        self._paused = True
        self._stop_reading()

    def resume_reading(self) -> None:
        self._paused = False
        self._read_more()

    def close(self) -> None:
        self._stop_reading()
        self._input_ended = True
        if self._waiting:
            self.write_eof()
        else:
            self._let_go()

    def abort(self) -> None:
        self._stop_reading()
        self._input_ended = True
        self._waiting.clear()
        self._let_go()

    # Input.

    def _read_more(self) -> None:
        if self._paused or self._input_ended or self._reading or self._relay is None:
            return
        self._reading = True
        if self._in_is_file:
            self._loop.call_soon(self._readable)
        else:
            self._loop.add_reader(self._in, self._readable)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            if not self._in_is_file:
                self._loop.remove_reader(self._in)

    def _readable(self) -> None:
        if not self._reading or self._relay is None:
            return
        if self._in_is_file:
            self._reading = False
        try:
            data = os.read(self._in, READ_BYTES)
        except BlockingIOError:
            data = None
        except OSError as error:
            self._fail(f"standard input: {error.strerror}")
            return
        if data:
            self._relay.received(self, data)
        elif data is not None:
            self._stop_reading()
            self._input_ended = True
            self._relay.ended(self)
        self._read_more()

    # Output.

    def _write(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._out, self._waiting)]
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._out, self._write)
        except OSError as error:
            self._waiting.clear()
            self._fail(f"standard output: {error.strerror}")
            return
        if self._writing and not self._waiting:
            self._loop.remove_writer(self._out)
            self._writing = False
            if self._end_pending:
                self._end_output()
        full = len(self._waiting) > FULL_BYTES
        if full != self._full and self._relay is not None:
            self._full = full
            (self._relay.full if full else self._relay.drained)(self)

    def _end_output(self) -> None:
        self._let_go()
        # ssh waits for the end of what it reads, and we may live on to read what it still sends.
        if stat.S_ISSOCK(os.fstat(self._out).st_mode):
            with socket.socket(fileno=os.dup(self._out)) as sock, contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            return
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._out)
        os.close(null)

    def _let_go(self) -> None:
        if self._output_over:
            return
        self._output_over = True
        if self._writing:
            self._loop.remove_writer(self._out)
            self._writing = False
        if self._restore_blocking:
            os.set_blocking(self._out, True)

    def _fail(self, text: str) -> None:
        self._stop_reading()
        self._input_ended = True
        self._let_go()
        if self._relay is not None:
            self._relay.failed(self, StreamResetError(text, CANCEL))


def _is_file(fd: int) -> bool:
    """Whether epoll cannot watch it: a regular file or a device that is no terminal."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not os.isatty(fd))


def _is_stream(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)

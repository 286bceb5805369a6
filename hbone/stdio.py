"""Standard input and output as one end of a tunnel.

ssh gives a ProxyCommand two pipes, or one socket; a shell gives files and terminals. The event loop cannot
watch files, which are always ready. Only the tunnel's bytes go to standard output.

After the end of the tunnel, `flushed` waits until the reader of the output has read the rest.

Child processes must not read the input. google-auth starts the programs that a credential file names, with
our standard input, and such a program could read the tunnel's bytes. So `own_input` moves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import stat

from shared.errors import StreamResetError
from shared.http2.frames import CANCEL
from shared.net.legs.contract import Buffer, RelayEnd
from shared.net.legs.read_buffer import READ_BYTES

FULL_BYTES = 256 << 10
"""Unwritten bytes beyond which the relay pauses: as many as for an HTTP/2 connection."""

MAX_SSH_LINE_BYTES = 255
"""Of an SSH identification, with its line end (RFC 4253 section 4.2)."""

STDIN = 0


def own_input() -> int:
    """Moves standard input to a descriptor that no child inherits (PEP 446), and returns that. Standard input
    is then /dev/null. To be called before a thread or a child is started."""
    own = os.dup(STDIN)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, STDIN)
    os.close(null)
    return own


class StdioLeg:
    """Two file descriptors as a leg. `error` is why one of them failed, None while both work."""

    def __init__(self, input_fd: int = STDIN, output_fd: int = 1) -> None:
        self.error: StreamResetError | None = None
        self._in = input_fd
        self._out = output_fd
        self._loop = asyncio.get_running_loop()
        self._relay: RelayEnd | None = None
        self._unwritten = bytearray()
        self._reading = False
        self._next_read: asyncio.Handle | None = None  # of a file, which no event announces
        self._paused = False
        self._input_ended = False
        self._early: bytes | None = None  # read before join; empty: the input had ended
        self._end_pending = False
        self._full = False
        self._writing = False
        self._output_over = asyncio.Event()
        self._in_is_file = not _can_be_watched(input_fd)
        # The shell, or any other process that shares a pipe or a terminal with us, gets it back as it was. A
        # write to a full pipe must not block the loop; one to a terminal never takes long. uvloop makes the
        # input non-blocking when it watches it.
        self._in_blocking = os.get_blocking(input_fd)
        self._out_blocking = os.get_blocking(output_fd)
        if _is_stream(output_fd):
            os.set_blocking(output_fd, False)

    def first_flight(self) -> bytes:
        """What may go with the tunnel request, because it has no effect by itself however often it arrives:
        an SSH identification or a ClientHello, if the input begins with one and it has come by now. It stays
        with us, too."""
        if self._early is None and not self._in_is_file:
            poll = select.poll()
            poll.register(self._in, select.POLLIN)
            if poll.poll(0):
                with contextlib.suppress(OSError):  # which the read after `join` will meet, too
                    self._early = os.read(self._in, READ_BYTES)
        return _first_flight_of(self._early or b"")

    def drop_first(self, size: int) -> None:
        """So many bytes of the first flight have been passed on."""
        if size:
            self._early = (self._early or b"")[size:] or None

    @property
    def abandoned(self) -> bool:
        """Whether the reader of our output has gone, so that no one needs the tunnel, or an error message."""
        return self.error is not None and isinstance(self.error.__cause__, ConnectionError)

    async def flushed(self) -> None:
        """Returns once all output is written, or cannot be written any more (`error` says why). This takes as
        long as the reader of our output does: with a pager it may be an hour."""
        await self._output_over.wait()

    # Leg.

    @property
    def buffered_bytes(self) -> int:
        return len(self._unwritten)

    def join(self, relay: RelayEnd) -> None:
        self._relay = relay
        if self.error is not None:
            relay.failed(self, self.error)
            return
        if self._full:
            relay.full(self)
        early, self._early = self._early, None
        if early:
            relay.received(self, early)
        elif early is not None:
            self._end_input()
            relay.ended(self)
        self._read_more()

    def write(self, data: Buffer) -> None:
        if self._output_over.is_set():
            return
        self._unwritten += data
        if self._writing:
            self._report_whether_full()
        else:
            self._write()

    def write_eof(self) -> None:
        self._end_pending = True
        if not self._unwritten:
            self._end_output()

    def pause_reading(self) -> None:
        self._paused = True
        self._stop_reading()

    def resume_reading(self) -> None:
        self._paused = False
        self._read_more()

    def close(self) -> None:
        self._end_input()
        self.write_eof()

    def abort(self) -> None:
        self._end_input()
        self._unwritten.clear()
        self._release()

    # Input.

    def _read_more(self) -> None:
        if self._paused or self._input_ended or self._reading or self._relay is None:
            return
        self._reading = True
        if self._in_is_file:
            self._next_read = self._loop.call_soon(self._readable)
        else:
            self._loop.add_reader(self._in, self._readable)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            if self._next_read is not None:
                self._next_read.cancel()
                self._next_read = None
            else:
                self._loop.remove_reader(self._in)

    def _end_input(self) -> None:
        self._stop_reading()
        self._input_ended = True
        self._restore_input()

    def _restore_input(self) -> None:
        # The input may be the same socket as the output, which has to stay non-blocking to its end.
        if self._input_ended and self._output_over.is_set():
            os.set_blocking(self._in, self._in_blocking)

    def _readable(self) -> None:
        if self._relay is None:
            return
        if self._in_is_file:
            self._reading = False
            self._next_read = None
        try:
            data = os.read(self._in, READ_BYTES)
        except BlockingIOError:
            data = None
        except OSError as error:
            self._fail("standard input", error)
            return
        if data:
            self._relay.received(self, data)
        elif data is not None:
            self._end_input()
            self._relay.ended(self)
        self._read_more()

    # Output.

    def _write(self) -> None:
        try:
            while self._unwritten:
                del self._unwritten[: os.write(self._out, self._unwritten)]
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._out, self._write)
        except OSError as error:
            self._fail("standard output", error)
            return
        if self._writing and not self._unwritten:
            self._loop.remove_writer(self._out)
            self._writing = False
            if self._end_pending:
                self._end_output()
        self._report_whether_full()

    def _report_whether_full(self) -> None:
        full = len(self._unwritten) > FULL_BYTES
        if full != self._full:
            self._full = full
            if self._relay is not None:
                (self._relay.full if full else self._relay.drained)(self)

    def _end_output(self) -> None:
        if self._output_over.is_set():
            return
        self._release()
        # ssh waits for the end of our output, while we may still have to read what it sends.
        if stat.S_ISSOCK(os.fstat(self._out).st_mode):
            with socket.socket(fileno=os.dup(self._out)) as sock, contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            return
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._out)
        os.close(null)

    def _release(self) -> None:
        if self._output_over.is_set():
            return
        self._output_over.set()
        if self._writing:
            self._loop.remove_writer(self._out)
            self._writing = False
        os.set_blocking(self._out, self._out_blocking)
        self._restore_input()

    def _fail(self, what: str, error: OSError) -> None:
        self._end_input()
        self._unwritten.clear()
        self._release()
        self.error = StreamResetError(f"{what}: {error.strerror}", CANCEL)
        self.error.__cause__ = error
        if self._relay is not None:
            self._relay.failed(self, self.error)


def _first_flight_of(data: bytes) -> bytes:
    if data.startswith(b"SSH-"):
        return data[: data.find(b"\n", 0, MAX_SSH_LINE_BYTES) + 1]
    if data[:1] == b"\x16":
        from shared.errors import ClientHelloError
        from shared.tls import client_hello  # few tunnels begin with one

        with contextlib.suppress(ClientHelloError):
            hello = client_hello.parse(data)
            return data[: hello.size] if hello is not None else b""
    return b""


def _can_be_watched(fd: int) -> bool:
    """Whether the event loop can wait for it (epoll_ctl(2), EPERM): pipes, sockets and terminals can be
    watched; regular files and /dev/null are always ready."""
    return _is_stream(fd) or os.isatty(fd)


def _is_stream(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)

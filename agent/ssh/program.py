"""A program that a session of the built-in sshd runs: its process, and the pipes or the terminal to it.

Nothing is read from the program while the client takes nothing, and nothing is taken from the client while
the program reads nothing: what is held for either is READ_BYTES and a channel's window.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import struct
import termios
from collections.abc import Callable, Mapping, Sequence

from agent.ssh import processes
from agent.ssh.login import Login, become
from shared import resource_limits
from shared.errors import UnavailableError

READ_BYTES = 64 * 1024
"""At a time, and what may wait to be written before the client is told to stop."""

LAST_OUTPUT_S = 2.0
"""Seconds for the output of a program that has ended: what it left behind may hold its pipes."""

_ENDED = (errno.EIO, errno.ECONNRESET)
"""What reading from a terminal gives once nobody has its other side open."""

# Modes of a terminal that a client sends (RFC 4254 section 8): the number there, and here the index in `cc`,
# or the flag with the place of its word in what tcgetattr gives.
_CHARACTERS = {
    **{1: termios.VINTR, 2: termios.VQUIT, 3: termios.VERASE, 4: termios.VKILL, 5: termios.VEOF},
    **{6: termios.VEOL, 7: termios.VEOL2, 8: termios.VSTART, 9: termios.VSTOP, 10: termios.VSUSP},
    **{12: termios.VREPRINT, 13: termios.VWERASE, 14: termios.VLNEXT, 18: termios.VDISCARD},
}
_FLAGS = {
    **{30: (0, termios.IGNPAR), 31: (0, termios.PARMRK), 32: (0, termios.INPCK), 33: (0, termios.ISTRIP)},
    **{34: (0, termios.INLCR), 35: (0, termios.IGNCR), 36: (0, termios.ICRNL), 38: (0, termios.IXON)},
    **{39: (0, termios.IXANY), 40: (0, termios.IXOFF), 41: (0, termios.IMAXBEL)},
    42: (0, 0o40000),  # IUTF8, which Python does not name
    **{50: (3, termios.ISIG), 51: (3, termios.ICANON), 53: (3, termios.ECHO), 54: (3, termios.ECHOE)},
    **{55: (3, termios.ECHOK), 56: (3, termios.ECHONL), 57: (3, termios.NOFLSH), 58: (3, termios.TOSTOP)},
    **{59: (3, termios.IEXTEN), 60: (3, termios.ECHOCTL), 61: (3, termios.ECHOKE)},
    **{70: (1, termios.OPOST), 72: (1, termios.ONLCR), 73: (1, termios.OCRNL), 74: (1, termios.ONOCR)},
    75: (1, termios.ONLRET),
}
_NO_CHARACTER = 255

Size = tuple[int, int]
"""Columns and rows."""


class Source:
    """A descriptor that is read from, and closed, by this object: `data(bytes)` gets what comes, `ended()` is
    called once at the end."""

    def __init__(self, fd: int, data: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._data = data
        self._ended = ended
        self._open = True
        self.read_bytes = 0
        """So far."""
        self._reading = False
        self._loop = asyncio.get_running_loop()
        self.resume()

    def pause(self) -> None:
        """Reads no more for now."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def resume(self) -> None:
        """Reads on."""
        if self._open and not self._reading:
            self._reading = True
            self._loop.add_reader(self._fd, self._ready)

    def close(self) -> None:
        """It is at its end, also if there is more."""
        if self._open:
            self.pause()
            self._open = False
            os.close(self._fd)
            self._ended()

    def _ready(self) -> None:
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in _ENDED:
                raise
            data = b""
        if data:
            self.read_bytes += len(data)
            self._data(data)
        else:
            self.close()


class Sink:
    """A descriptor that is written to, and closed, by this object. `drained()` is called when what has waited
    is written, or will never be."""

    def __init__(self, fd: int, drained: Callable[[], None]) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._drained = drained
        self._open = True
        self._ending = False
        self._waiting = bytearray()
        self._loop = asyncio.get_running_loop()

    @property
    def is_full(self) -> bool:
        """Whether nothing more is to come until `drained`."""
        return len(self._waiting) >= READ_BYTES

    def write(self, data: bytes) -> None:
        """Writes now or later; nothing once the reader is gone."""
        if not self._open or self._ending:
            return
        if self._waiting:
            self._waiting += data
            return
        taken = self._write(data)
        if self._open and taken < len(data):
            self._waiting += data[taken:]
            self._loop.add_writer(self._fd, self._ready)

    def end(self) -> None:
        """Closes it behind what waits."""
        self._ending = True
        if not self._waiting:
            self.close()

    def close(self) -> None:
        """Closes it now."""
        if self._open:
            self._open = False
            if self._waiting:
                self._loop.remove_writer(self._fd)
                self._waiting.clear()
            os.close(self._fd)
            self._drained()

    def _ready(self) -> None:
        taken = self._write(bytes(self._waiting[:READ_BYTES]))
        if not self._open:
            return
        del self._waiting[:taken]
        if not self._waiting:
            self._loop.remove_writer(self._fd)
            if self._ending:
                self.close()
            else:
                self._drained()

    def _write(self, data: bytes) -> int:
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            return 0
        except OSError:  # the reader is gone
            self.close()
            return 0


class Program:
    """A running one, made by `start`. `output(data)` and `errors(data)` get what it writes, `drained()` is
    called when it takes input again."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        terminal: int | None,
        sink: Sink,
        sources: Sequence[Source],
        all_read: asyncio.Event,
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._terminal = terminal
        self._sink = sink
        self._sources = sources
        self._all_read = all_read
        self._unpaused = asyncio.Event()
        self._unpaused.set()

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        user: Login,
        environ: Mapping[str, str],
        *,
        terminal: Terminal | None = None,
        output: Callable[[bytes], None],
        errors: Callable[[bytes], None],
        drained: Callable[[], None],
    ) -> Program:
        """Starts `command` as `user` in a session of its own, on `terminal` or with pipes. Raises
        UnavailableError."""
        inner, outer = _ends(terminal)
        first = inner[0]
        if terminal is not None and not user.is_own:
            os.fchown(first, user.uid, -1)

        def prepare() -> None:
            _keep_files()
            os.setsid()
            if terminal is not None:
                fcntl.ioctl(first, termios.TIOCSCTTY, 0)
            os.umask(0o022)
            become(user)

        try:
            with resource_limits.as_started():
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=inner[0],
                    stdout=inner[1],
                    stderr=inner[2],
                    env=environ,
                    cwd=_folder(environ),
                    preexec_fn=prepare,
                )
        except BaseException as error:
            for fd in set(outer):
                os.close(fd)
            if isinstance(error, OSError | ValueError):  # ValueError: a NUL in it
                text = getattr(error, "strerror", None) or str(error)
                raise UnavailableError(f"cannot start {command[0]}: {text}") from error
            raise
        finally:
            for fd in set(inner):
                os.close(fd)
        left: set[int] = set()
        all_read = asyncio.Event()

        def source(number: int, fd: int, data: Callable[[bytes], None]) -> Source:
            def ended() -> None:
                left.discard(number)
                if not left:
                    all_read.set()

            left.add(number)
            return Source(fd, data, ended)

        if terminal is not None:
            made = Sink(os.dup(outer[0]), drained)
            sources = [source(1, os.dup(outer[0]), output)]
            return cls(process, outer[0], made, sources, all_read)
        made = Sink(outer[0], drained)
        sources = [source(1, outer[1], output), source(2, outer[2], errors)]
        return cls(process, None, made, sources, all_read)

    def write(self, data: bytes) -> bool:
        """Gives it input; False: no more, until it has `drained`."""
        self._sink.write(data)
        return not self._sink.is_full

    def end_input(self) -> None:
        """There is no more input. A terminal has no end that a program would see: it hangs up with the
        connection."""
        if self._terminal is None:
            self._sink.end()

    def pause(self) -> None:
        """Reads no more of its output for now, and so stops it in time."""
        self._unpaused.clear()
        for source in self._sources:
            source.pause()

    def resume(self) -> None:
        """Reads on."""
        self._unpaused.set()
        for source in self._sources:
            source.resume()

    def resize(self, size: Size) -> None:
        """The terminal has another size, of which the kernel tells the program."""
        if self._terminal is not None:
            set_size(self._terminal, size)

    def send(self, signum: int) -> None:
        """Sends a signal to the group of processes that it leads, and to those in the terminal's
        foreground."""
        groups = {self.pid} if self._process.returncode is None else set()
        if self._terminal is not None:
            with contextlib.suppress(OSError):
                groups.add(os.tcgetpgrp(self._terminal))
        for group in groups - {0}:  # 0 is none in the foreground, and for kill(2) our own group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signum)

    async def wait(self) -> int:
        """Its exit code, -N after signal N, once it has ended and all that it wrote has been passed on. What
        is left of its session is ended then."""
        code = await self._process.wait()
        await processes.end(lambda: processes.in_session(self.pid))
        while not self._all_read.is_set():
            await self._unpaused.wait()  # for a client that reads slowly
            before = self.read_bytes
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_OUTPUT_S):
                    await self._all_read.wait()
            if self._unpaused.is_set() and before == self.read_bytes:
                break  # a daemon holds the pipe
        self.close()
        return code

    @property
    def read_bytes(self) -> int:
        """What it has written so far."""
        return sum(source.read_bytes for source in self._sources)

    async def kill(self) -> None:
        """Ends it, with its session, in GRACE_S at the latest."""
        self.send(signal.SIGHUP)
        self.close()
        await processes.end(lambda: processes.in_session(self.pid))
        await self._process.wait()

    def close(self) -> None:
        """Closes what leads to it; a terminal hangs up, if no process has it open by itself."""
        self._unpaused.set()
        self._sink.close()
        for source in self._sources:
            source.close()
        if self._terminal is not None:
            terminal, self._terminal = self._terminal, None
            os.close(terminal)


class Terminal:
    """What a client says of its own."""

    def __init__(self, kind: str, size: Size, modes: Mapping[int, int]) -> None:
        self.kind = kind
        """TERM."""
        self.size = size
        self.modes = modes
        """As RFC 4254 numbers them."""


def _ends(terminal: Terminal | None) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """What the program gets as its three streams, and our ends of it. Raises UnavailableError."""
    pipes: list[int] = []
    try:
        if terminal is not None:
            ours, its = os.openpty()
            set_size(ours, terminal.size)
            _set_modes(its, terminal.modes)
            return (its, its, its), (ours,)
        for _ in range(3):
            pipes += os.pipe()
    except OSError as error:
        for fd in pipes:
            os.close(fd)
        raise UnavailableError(f"no terminal or pipe: {error.strerror}") from error
    stdin, to_stdin, from_stdout, stdout, from_stderr, stderr = pipes
    return (stdin, stdout, stderr), (to_stdin, from_stdout, from_stderr)


def _keep_files() -> None:
    """In a child: nothing but the three streams is open in the program. uvloop gives it a second copy of
    each, and whatever krun itself was started with."""
    with contextlib.suppress(OSError):  # no /proc
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                with contextlib.suppress(OSError):  # the folder's own
                    os.set_inheritable(int(name), False)


def _folder(environ: Mapping[str, str]) -> str:
    home = environ.get("HOME", "/")
    return home if os.path.isdir(home) else "/"


def set_size(terminal: int, size: Size) -> None:
    """Tells the kernel how large a terminal is."""
    columns, rows = (min(number, 0xFFFF) for number in size)
    with contextlib.suppress(OSError):
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _set_modes(terminal: int, modes: Mapping[int, int]) -> None:
    attributes = termios.tcgetattr(terminal)
    for number, value in modes.items():
        if number in _CHARACTERS:
            character = b"\0" if value == _NO_CHARACTER else bytes([value & 0xFF])
            attributes[6][_CHARACTERS[number]] = character
        elif number in _FLAGS:
            word, flag = _FLAGS[number]
            attributes[word] = attributes[word] | flag if value else attributes[word] & ~flag
    with contextlib.suppress(termios.error):
        termios.tcsetattr(terminal, termios.TCSANOW, attributes)

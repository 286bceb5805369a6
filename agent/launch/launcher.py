"""Our child processes, the app above all: starting it, passing signals on, collecting it.

Owned here: what the launched command gets to see (its PORT, signals, standard streams) and what its end means
as an exit code, as shells count: its own, 128+N after signal N, 127 not found, 126 not executable. Not owned:
when to stop what, which is the agent's story.

Signals go to the app's own process and to no group, as under `docker --init` and tini: Cloud Run sends
SIGTERM to the container's first process only, and an app that has workers knows best what to tell them. What
is typed at a terminal reaches the whole foreground group from the kernel, so it is not passed on once more.

A signal that krun was started to ignore (by nohup, or by a script's `&`) is ignored by the app as well,
unless it asks for it, and is passed on without ending krun: all as if the app had been started without krun.
In a container's first process nobody has asked for that: there all signals have their defaults
(`reset_signals`).

As the container's first process krun leaves a parent of itself in that place (`become_init`), which collects
the orphans that end up there. The event loop collects only its own children, reserves SIGCHLD, and would lose
their exit codes to a collector of everything beside it; two processes cannot get into each other's way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType

from shared import resource_limits
from shared.address import Address
from shared.errors import DialError, UnavailableError
from shared.net.dial import dial_socket
from shared.tasks import spawn

log = logging.getLogger("hbone.launcher")

EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
EXIT_SIGNAL_BASE = 128
"""POSIX shell, "Exit Status for Commands"."""

FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
)
"""What people and platforms send to a service, and the terminal's change of size."""

_NOT_INHERITED = frozenset({signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD})
"""The first two are ignored by Python itself, so what they were before cannot be told; without the third the
app would lose its children's exit codes."""

TYPED = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH})
"""Those of them that a terminal sends by itself to all processes in its foreground."""

POLL_S = 0.02
"""Between two looks at the app's port: nobody tells when a port opens, a refused connection costs 0.1 ms."""

PROBE_TIMEOUT_S = 1.0
"""For one look; the app is near, and if it is not, the next look is for the exit and the deadline."""

_INIT_PID = 1


class Child:
    """A process that we started."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.pid = process.pid
        self.exited: asyncio.Future[int] = spawn(_exit_code_of(process), name=f"{name} (pid {process.pid})")
        """Its exit code, once it has ended. Look at it or give it to `asyncio.wait`; `wait` awaits it."""
        self._process = process

    @property
    def end(self) -> str:
        """How it has ended, in words; empty while it runs."""
        code = self._process.returncode
        if code is None:
            return ""
        return f"exit code {code}" if code >= 0 else f"killed by {_name(-code)}"

    async def wait(self) -> int:
        """Waits for the end and returns the exit code; any number of callers may."""
        return await asyncio.shield(self.exited)

    def send(self, signum: int) -> None:
        """Sends a signal; a process that has ended gets none."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    async def stop(self, grace_s: float) -> int:
        """Ends the process, by force unless it follows SIGTERM within `grace_s` seconds; its exit code."""
        self.send(signal.SIGTERM)
        await asyncio.wait({self.exited}, timeout=grace_s)
        if not self.exited.done():
            log.warning("%s has not ended %g s after SIGTERM: killed", self.name, grace_s)
            self.send(signal.SIGKILL)
        return await self.wait()


class App(Child):
    """The app: the command that krun was given."""

    _ignored: frozenset[signal.Signals]

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environ: Mapping[str, str],
        port: int,
        *,
        ignored: Collection[signal.Signals] = (),
    ) -> App:
        """Starts `command` with our standard streams and with `environ`, in which PORT becomes `port`. It
        ignores the signals `ignored`; all others have their defaults. Its limits are those that we were
        started with.

        Raises UnavailableError with the exit code 127 or 126 when it cannot be started.
        """
        environ = {**environ, "PORT": str(port)}
        try:
            with resource_limits.as_started():
                process = await asyncio.create_subprocess_exec(*_ignoring(ignored), *command, env=environ)
        except OSError as error:
            raise _not_started(command[0], error, environ.get("PATH")) from error
        app = cls("app", process)
        app._ignored = frozenset(ignored)
        return app

    def forward_signals(self, notice: Callable[[int], None] | None = None) -> None:
        """Passes the FORWARDED signals on to the app from now on; `notice` hears of each first, but for those
        that the app was started to ignore."""
        loop = asyncio.get_running_loop()
        for signum in FORWARDED:
            told = None if signum in self._ignored else notice
            loop.add_signal_handler(signum, self._forward, signum, told)

    def _forward(self, signum: int, notice: Callable[[int], None] | None) -> None:
        if notice is not None:
            notice(signum)
        if not _sent_by_terminal(signum):
            self.send(signum)

    async def wait_listening(self, address: Address, timeout_s: float) -> bool:
        """Waits until `address` accepts connections: True, or False when the app has ended before.

        Raises UnavailableError when neither has happened after `timeout_s` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self.exited.done():
            if await accepts(address):
                return True
            if loop.time() >= deadline:
                raise UnavailableError(
                    f"app does not listen on {address} after {timeout_s:g} s: "
                    f"it has to use the PORT that it is given, or HBONE_APP has to name its address"
                )
            await asyncio.wait({self.exited}, timeout=POLL_S)
        return False


def ignored_signals() -> frozenset[signal.Signals]:
    """The signals that this process was started to ignore, and the app is to ignore as well; to be asked
    before there are handlers of our own."""
    return frozenset(
        signum
        for signum in set(signal.Signals) - _NOT_INHERITED
        if signum < signal.SIGRTMIN and signal.getsignal(signum) is signal.SIG_IGN
    )


def reset_signals(own_pid: int) -> None:
    """Gives all signals their defaults and lets all come, in a container's first process, which `own_pid`
    says that we are; does nothing in any other."""
    if own_pid == _INIT_PID:
        for signum in {*ignored_signals(), signal.SIGCHLD}:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


def become_init(own_pid: int) -> None:
    """Leaves the place of the first process, if `own_pid` says that it is ours, to a parent that only passes
    signals on and collects orphans; returns in its child, and at once in any other process.

    Has to be called before an event loop or a thread exists. The parent ends when the child does, with the
    child's exit code; the kernel then ends whatever else runs in the container.
    """
    if own_pid != _INIT_PID:
        return
    # The first process gets no signal that it has not asked for, so one that comes too early has to wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    child = os.fork()
    if child != 0:
        _collect_until(child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


def _collect_until(child: int) -> None:
    """Collects whatever ends, and ends with `child`; never returns."""

    def forward(signum: int, _frame: FrameType | None) -> None:
        if not _sent_by_terminal(signum):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signum)

    for signum in FORWARDED:
        signal.signal(signum, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(exit_code(os.waitstatus_to_exitcode(status)))


def exit_code(returncode: int) -> int:
    """A process's end, given as Python gives it (-N after signal N), as the exit code that shells show."""
    return EXIT_SIGNAL_BASE - returncode if returncode < 0 else returncode


async def _exit_code_of(process: asyncio.subprocess.Process) -> int:
    return exit_code(await process.wait())


def _ignoring(signals: Collection[signal.Signals]) -> list[str]:
    """A command that ignores `signals` and becomes the command behind it. The event loop gives a child's
    signals their defaults, after anything that we could do in it."""
    if not signals:
        return []
    numbers = " ".join(str(int(signum)) for signum in sorted(signals))
    return ["/bin/sh", "-c", f'trap "" {numbers}; exec "$@"', "krun"]


def _not_started(program: str, cause: OSError, path: str | None) -> UnavailableError:
    if not isinstance(cause, FileNotFoundError):
        error = UnavailableError(f"cannot start {program}: {cause.strerror or cause}")
        error.exit_code = EXIT_NOT_EXECUTABLE
        return error
    import shutil  # 1 ms that a start without such an error can spare

    # The same error says that a script's interpreter is missing (execve(2), ENOENT).
    there = shutil.which(program, path=path) is not None
    reason = "its interpreter is not found" if there else "no such command"
    error = UnavailableError(f"cannot start {program}: {reason}")
    error.exit_code = EXIT_NOT_FOUND
    return error


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


def _sent_by_terminal(signum: int) -> bool:
    """Whether the terminal has sent this signal to the app as well: we are in its foreground."""
    if signum not in TYPED:
        return False
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False  # no terminal belongs to this session
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False  # it has hung up
    finally:
        os.close(terminal)


async def accepts(address: Address) -> bool:
    """Whether somebody listens on `address`."""
    try:
        sock = await dial_socket(address, PROBE_TIMEOUT_S)
    except DialError:  # refused, unreachable, no such name yet, or timed out
        return False
    with sock:
        # Where nobody listens, a connection to a port of the ephemeral range can by chance reach its own end.
        return bool(sock.getsockname() != sock.getpeername())

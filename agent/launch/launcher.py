"""krun's child processes, above all the app: starting them, passing signals on, waiting for their end.

The exit code of a child is a shell's: its own, 128+N after signal N, 127 not found, 126 not executable.

Signals are passed on to the app's process and not to its group, as under `docker --init` and tini: Cloud Run
sends SIGTERM only to the container's first process, and an app with workers stops them itself. The kernel
sends what is typed at a terminal to the whole foreground group, so this is not passed on.

If krun was started with a signal ignored (by nohup, or by a script's `&`), the app starts with it ignored,
too. Such a signal is passed on, and does not end krun. So the app behaves as without krun. In a container's
first process an ignored signal is nobody's wish: there all signals have their defaults (`reset_signals`).

As the container's first process krun leaves a parent of itself in that place (`become_init`), which waits for
the orphans in the container. The event loop could not: it waits only for its own children, and another waiter
in the process would take their exit codes from it.
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
from shared.errors import UnavailableError
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
"""The signals that people and platforms send to a service, and a terminal's change of size."""

_NOT_INHERITED = frozenset({signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD})
"""Python itself ignores the first two, so their state before is unknown. With the third ignored, the app
would not get its children's exit codes."""

TYPED = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH})
"""Those of FORWARDED that a terminal sends to all processes in its foreground."""

_INIT_PID = 1


class Child:
    """A child process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.pid = process.pid
        self.exited: asyncio.Future[int] = spawn(_exit_code_of(process), name=f"{name} (pid {process.pid})")
        """Its exit code, once it has ended. For `done`, `result` and `asyncio.wait`; to await it, use
        `wait`."""
        self._process = process

    @property
    def end(self) -> str:
        """How it has ended, as text; empty while it runs."""
        code = self._process.returncode
        if code is None:
            return ""
        return f"exit code {code}" if code >= 0 else f"killed by {_name(-code)}"

    async def wait(self) -> int:
        """Waits for the end and returns the exit code. There may be several callers."""
        return await asyncio.shield(self.exited)

    def send(self, signum: int) -> None:
        """Sends a signal, unless the process has ended."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    async def stop(self, grace_s: float) -> int:
        """Sends SIGTERM, and SIGKILL after `grace_s` seconds; returns the exit code."""
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
        starts with the signals `ignored` ignored, all others at their defaults, and with the resource limits
        that krun was started with.

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
        """From now on passes the FORWARDED signals on to the app. Before that, `notice` is called, except for
        those that the app was started to ignore."""
        loop = asyncio.get_running_loop()
        for signum in FORWARDED:
            called = None if signum in self._ignored else notice
            loop.add_signal_handler(signum, self._forward, signum, called)

    def _forward(self, signum: int, notice: Callable[[int], None] | None) -> None:
        if notice is not None:
            notice(signum)
        if not _sent_by_terminal(signum):
            self.send(signum)


def ignored_signals() -> frozenset[signal.Signals]:
    """The signals that this process was started to ignore, as the app will be. To be called before handlers
    are set."""
    return frozenset(
        signum
        for signum in set(signal.Signals) - _NOT_INHERITED
        if signum < signal.SIGRTMIN and signal.getsignal(signum) is signal.SIG_IGN
    )


def reset_signals(own_pid: int) -> None:
    """If `own_pid` is that of a container's first process, gives all signals their defaults and unblocks
    them."""
    if own_pid == _INIT_PID:
        for signum in {*ignored_signals(), signal.SIGCHLD}:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


def become_init(own_pid: int) -> None:
    """If `own_pid` is that of a container's first process, forks: the parent only passes signals on and waits
    for orphans, and this returns in the child.

    Has to be called before there is an event loop or a thread. The parent exits with the child's exit code,
    when the child does; the kernel then ends all other processes in the container.
    """
    if own_pid != _INIT_PID:
        return
    # The kernel drops signals for the first process that have no handler, so they are blocked until then.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    child = os.fork()
    if child != 0:
        _wait_until_end_of(child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


def _wait_until_end_of(child: int) -> None:
    """Waits for all children, and exits when `child` has ended; never returns."""

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
    """The exit code that a shell shows for Python's `returncode`, which is -N after signal N."""
    return EXIT_SIGNAL_BASE - returncode if returncode < 0 else returncode


async def _exit_code_of(process: asyncio.subprocess.Process) -> int:
    return exit_code(await process.wait())


def _ignoring(signals: Collection[signal.Signals]) -> list[str]:
    """The beginning of a command line that ignores `signals` and then executes the rest. It is needed because
    the event loop resets a child's signals as the last thing before exec."""
    if not signals:
        return []
    numbers = " ".join(str(int(signum)) for signum in sorted(signals))
    return ["/bin/sh", "-c", f'trap "" {numbers}; exec "$@"', "krun"]


def _not_started(program: str, cause: OSError, path: str | None) -> UnavailableError:
    if not isinstance(cause, FileNotFoundError):
        error = UnavailableError(f"cannot start {program}: {cause.strerror or cause}")
        error.exit_code = EXIT_NOT_EXECUTABLE
        return error
    import shutil  # takes 1 ms, and most starts do not need it

    # A missing interpreter of a script is the same error (execve(2), ENOENT).
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
    """Whether a terminal has sent this signal, and so to the app as well: we are in its foreground."""
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

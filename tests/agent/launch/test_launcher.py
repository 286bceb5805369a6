"""The app as a child process: what it sees, what it is sent, and what its end means. All real processes."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from agent.config.probe import Probe
from agent.launch.launcher import FORWARDED, App, become_init
from agent.launch.startup import ready
from shared.address import Address
from shared.errors import UnavailableError
from tests.support.network import free_port

PATIENCE_S = 20
"""Longer than anything here takes, even on a busy machine; reached only by a test that fails."""

SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]


async def ended(*command: str, **variables: str) -> int:
    app = await App.start(command, {**os.environ, **variables}, 8080)
    return await app.wait()


# What the app sees.


async def test_the_app_gets_the_environment_and_its_port(capfd: pytest.CaptureFixture[str]) -> None:
    assert await ended("sh", "-c", "echo $GREETING on $PORT", GREETING="hello", PORT="15009") == 0
    assert capfd.readouterr().out == "hello on 8080\n"


async def test_the_app_has_our_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert await ended("sh", "-c", "echo trouble >&2") == 0
    assert capfd.readouterr().err == "trouble\n"


async def test_the_app_stays_in_our_process_group(capfd: pytest.CaptureFixture[str]) -> None:
    assert await ended(sys.executable, "-c", "import os; print(os.getpgrp())") == 0
    assert capfd.readouterr().out == f"{os.getpgrp()}\n"


async def test_the_command_is_looked_for_on_the_path_that_the_app_gets(tmp_path: Path) -> None:
    script = tmp_path / "hello-app"
    script.write_text("#!/bin/sh\nexit 5\n")
    script.chmod(0o755)
    assert await ended("hello-app", PATH=f"{tmp_path}:{os.environ['PATH']}") == 5


# What its end means.


@pytest.mark.parametrize("code", [0, 1, 7, 255])
async def test_its_own_exit_code_is_kept(code: int) -> None:
    assert await ended("sh", "-c", f"exit {code}") == code


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
async def test_a_signals_number_is_added_to_128(signum: signal.Signals) -> None:
    assert await ended("sh", "-c", f"kill -{signum} $$") == 128 + signum


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder with programs that cannot be started."""
    (tmp_path / "text").write_text("no program\n")
    interpreted = tmp_path / "interpreted"
    interpreted.write_text("#!/nonexistent/interpreter\n")
    interpreted.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("nonexistent", 127, "no such command"),
        ("interpreted", 127, "its interpreter is not found"),
        ("text", 126, "Permission denied"),
        ("", 126, "Permission denied"),
    ],
)
async def test_a_command_that_cannot_be_started(broken: Path, name: str, code: int, reason: str) -> None:
    command = f"{broken}/{name}"
    with pytest.raises(UnavailableError) as caught:
        await ended(command)
    assert str(caught.value) == f"cannot start {command}: {reason}"
    assert caught.value.exit_code == code


async def test_several_can_wait_and_one_of_them_may_give_up() -> None:
    app = await App.start(SLEEPER, os.environ, 8080)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(app.wait(), timeout=0)
    stopped, seen = await asyncio.gather(app.stop(PATIENCE_S), app.wait())
    assert stopped == seen == await app.wait() == 128 + signal.SIGTERM


# Stopping it.


async def test_stop_lets_it_end_by_itself() -> None:
    app = await App.start(SLEEPER, os.environ, 8080)
    assert await app.stop(PATIENCE_S) == 128 + signal.SIGTERM
    assert await app.stop(PATIENCE_S) == 128 + signal.SIGTERM, "a second time does no harm"


async def test_stop_uses_force_after_the_grace(caplog: pytest.LogCaptureFixture) -> None:
    app, address = await start_listener("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    assert await ready(Probe(address), PATIENCE_S, app.exited)
    assert await app.stop(0.05) == 128 + signal.SIGKILL
    assert caplog.messages == ["app has not ended 0.05 s after SIGTERM: killed"]


async def start_listener(first: str = "pass") -> tuple[App, Address]:
    """An app that does `first`, then listens on its PORT and stays."""
    code = f"""
import os, signal, socket
{first}
server = socket.create_server(("127.0.0.1", int(os.environ["PORT"])))
signal.pause()
"""
    port = free_port()
    app = await App.start([sys.executable, "-c", code], os.environ, port)
    return app, Address("127.0.0.1", port)


async def test_an_app_that_has_ended_is_sent_nothing() -> None:
    app = await App.start(["true"], os.environ, 8080)
    assert await app.wait() == 0
    app.send(signal.SIGTERM)


# Signals: a launcher of its own, so that the tests' process keeps its handlers.

LAUNCHER = [
    sys.executable,
    "-c",
    """
import fcntl, os, signal, sys, termios
from agent.launch.launcher import App, ignored_signals, reset_signals
from shared import loop

if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if os.environ.get("AS_FIRST_PROCESS"):
    reset_signals(1)

async def main():
    app = await App.start(sys.argv[1:], os.environ, 8080, ignored=ignored_signals())
    # In one write each: the app's line may come at the same time, and Python may be told to buffer nothing.
    app.forward_signals(lambda signum: os.write(1, f"notice {signal.Signals(signum).name}\\n".encode()))
    print("launcher ready", flush=True)
    return await app.wait()

sys.exit(loop.run(main()))
""",
]
"""Starts the app that its arguments say, and prints each notice."""

REPORTER = [
    sys.executable,
    "-c",
    """
import os, signal
def report(signum, _):
    os.write(1, f"app {signal.Signals(signum).name}\\n".encode())
    if signum == signal.SIGTERM:
        raise SystemExit(9)
for name in ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH"]:
    signal.signal(getattr(signal, name), report)
print("app ready", flush=True)
while True:
    signal.pause()
""",
]
"""An app that prints each signal it gets, and ends with 9 after SIGTERM."""


class Launched:
    """A launcher's process with its output, line by line."""

    def __init__(self, process: subprocess.Popen[bytes], output: int) -> None:
        self.process = process
        self._output = output
        self._unread = b""

    def line(self) -> str:
        """The next line; empty at the end of the output."""
        while b"\n" not in self._unread:
            assert select.select([self._output], [], [], PATIENCE_S)[0], f"no further line; {self._unread!r}"
            try:
                read = os.read(self._output, 4096)
            except OSError:  # a terminal says so when nobody writes to it any more
                read = b""
            if not read:
                return ""
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode().strip()

    def type(self, keys: bytes) -> None:
        """Types `keys` at the launcher's terminal."""
        os.write(self._output, keys)

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)


@contextmanager
def launched(
    *command: str, terminal: bool = False, ignoring: Collection[signal.Signals] = (), **variables: str
) -> Iterator[Launched]:
    """Runs a launcher in a session of its own, its output on a pipe or all its streams on a terminal. It is
    started to ignore the signals `ignoring` and no others, whatever the tests were started to ignore."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    if terminal:
        do_not_echo(theirs)

    def set_signals() -> None:
        for signum in {*FORWARDED, *ignoring}:
            signal.signal(signum, signal.SIG_IGN if signum in ignoring else signal.SIG_DFL)

    process = subprocess.Popen(
        command,
        stdin=theirs if terminal else subprocess.DEVNULL,
        stdout=theirs,
        start_new_session=True,
        preexec_fn=set_signals,
        env={**os.environ, **variables},
    )
    os.close(theirs)
    try:
        yield Launched(process, ours)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)
        os.close(ours)


def do_not_echo(terminal: int) -> None:
    attributes = termios.tcgetattr(terminal)
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)


def test_every_signal_reaches_the_app_after_its_notice() -> None:
    with launched(*LAUNCHER, *REPORTER) as launcher:
        assert sorted([launcher.line(), launcher.line()]) == ["app ready", "launcher ready"]
        for signum in sorted(FORWARDED, key=lambda signum: signum == signal.SIGTERM):
            launcher.process.send_signal(signum)
            assert [launcher.line(), launcher.line()] == [f"notice {signum.name}", f"app {signum.name}"]
        assert launcher.exit_code() == 9


IGNORED_FROM_THE_START = [
    pytest.param({signal.SIGHUP}, id="nohup"),
    pytest.param({signal.SIGINT, signal.SIGQUIT}, id="a script's background"),
    pytest.param({signal.SIGTERM, signal.SIGUSR1, signal.SIGTTOU}, id="others"),
]

DISPOSITIONS = [
    sys.executable,
    "-c",
    """
from pathlib import Path
[line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigIgn:")]
mask = int(line.split()[1], 16) & ~(1 << 12 | 1 << 24)  # Python itself ignores SIGPIPE and SIGXFSZ
print("app ignores", *[number + 1 for number in range(31) if mask >> number & 1], flush=True)
""",
]
"""An app that prints which signals it was started to ignore."""


@pytest.mark.parametrize("ignored", IGNORED_FROM_THE_START)
def test_the_app_ignores_what_krun_was_started_to_ignore(ignored: set[signal.Signals]) -> None:
    with launched(*LAUNCHER, *DISPOSITIONS, ignoring=ignored) as launcher:
        lines = {launcher.line(), launcher.line()}
        assert " ".join(["app ignores", *(str(int(signum)) for signum in sorted(ignored))]) in lines
        assert launcher.exit_code() == 0


@pytest.mark.parametrize("ignored", IGNORED_FROM_THE_START)
def test_in_a_first_process_the_app_ignores_nothing(ignored: set[signal.Signals]) -> None:
    with launched(*LAUNCHER, *DISPOSITIONS, ignoring=ignored, AS_FIRST_PROCESS="1") as launcher:
        assert "app ignores" in {launcher.line(), launcher.line()}
        assert launcher.exit_code() == 0


def test_a_signal_ignored_from_the_start_does_not_end_the_launcher() -> None:
    """The app gets it, for it has asked for it."""
    with launched(*LAUNCHER, *REPORTER, ignoring={signal.SIGINT}) as launcher:
        assert sorted([launcher.line(), launcher.line()]) == ["app ready", "launcher ready"]
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.line() == "app SIGINT", "there is no notice of it"
        launcher.process.send_signal(signal.SIGTERM)
        assert [launcher.line(), launcher.line()] == ["notice SIGTERM", "app SIGTERM"]
        assert launcher.exit_code() == 9


def test_a_command_that_cannot_be_started_while_a_signal_is_ignored() -> None:
    with launched(*LAUNCHER, "/nonexistent/command", ignoring={signal.SIGHUP}) as launcher:
        assert launcher.exit_code() == 127


def test_what_is_typed_at_a_terminal_reaches_the_app_once() -> None:
    with launched(*LAUNCHER, *REPORTER, terminal=True) as launcher:
        assert sorted([launcher.line(), launcher.line()]) == ["app ready", "launcher ready"]
        launcher.type(b"\x03")
        typed = [launcher.line(), launcher.line()]
        launcher.process.send_signal(signal.SIGTERM)
        assert sorted(typed) == ["app SIGINT", "notice SIGINT"]
        assert [launcher.line(), launcher.line()] == ["notice SIGTERM", "app SIGTERM"]
        assert launcher.exit_code() == 9


# As the first process.

FIRST_PROCESS = """
import ctypes, os, signal, subprocess, sys, time
from agent.launch.launcher import become_init
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
become_init(1)
"""
"""Orphans come to this process as they do to a container's first."""


def test_the_first_process_collects_orphans_and_ends_with_its_child() -> None:
    makes_orphan = """
parent = subprocess.Popen(["sh", "-c", "cat <&0 >/dev/null & echo $!"], stdin=-1, stdout=-1)
orphan = int(parent.stdout.readline())
parent.wait()
parent.stdin.close()  # which ends the orphan
deadline = time.monotonic() + 10
while time.monotonic() < deadline:
    try:
        os.kill(orphan, 0)  # finds zombies too
    except ProcessLookupError:
        sys.exit(5)
sys.exit(6)
"""
    with launched(sys.executable, "-c", FIRST_PROCESS + makes_orphan) as first:
        assert first.exit_code() == 5


def test_the_first_process_passes_signals_on() -> None:
    waits = "print(os.getppid(), flush=True)\nsignal.pause()"
    with launched(sys.executable, "-c", FIRST_PROCESS + waits) as first:
        assert int(first.line()) == first.process.pid, "what follows become_init runs in the child"
        first.process.send_signal(signal.SIGTERM)
        assert first.exit_code() == 128 + signal.SIGTERM


def test_any_other_process_stays_what_it_is() -> None:
    pid = os.getpid()
    become_init(pid)
    assert os.getpid() == pid

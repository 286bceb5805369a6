"""What people do with ssh, by real OpenSSH, at each of PLACES."""

from __future__ import annotations

import os
import re
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.path.app import App, echo
from tests.path.programs import MUCH_BYTES, random_file, sha256
from tests.path.sshd import lets_us_in
from tests.slow.ssh.places import Place
from tests.support.network import free_port
from tests.support.world import PATIENCE_S, find_program

pytestmark = lets_us_in

SESSIONS = 50

TRANSFERS = 6
"""At once, through each kind of forward."""

TRANSFER_BYTES = 8 << 20


def test_a_command_s_output_and_exit_code(here: Place) -> None:
    done = here.ssh("hello", "cat; echo to standard error >&2; exit 7", stdin=b"from standard input")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"from standard input", b"to standard error\n")


def test_a_command_that_a_signal_ends(here: Place) -> None:
    assert here.ssh("hello", "kill -TERM $$").returncode == 255


# A terminal.


_CONTROLS = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]|\r")
"""What the shell's line editor says to the terminal."""


class Terminal:
    """A tmux of its own, with one window in which `command` runs."""

    def __init__(self, folder: Path, command: str) -> None:
        self._tmux = [find_program("tmux"), "-S", str(folder / "tmux"), "-f", "/dev/null"]
        shown = folder / "shown"
        os.mkfifo(shown)
        self._fd = os.open(shown, os.O_RDONLY | os.O_NONBLOCK)
        self._seen = ""
        # It waits for a line, so that all that the command shows is seen.
        line = f"read go; {command}; echo ended with $?; read end"
        self.run("new-session", "-d", "-x", "80", "-y", "24", line)
        self.run("pipe-pane", f"exec cat >{shown}")
        self.type("Enter")

    def run(self, *words: str) -> None:
        """A command of tmux's."""
        ran = subprocess.run([*self._tmux, *words], capture_output=True, text=True, timeout=PATIENCE_S)
        assert ran.returncode == 0, ran.stderr

    def type(self, *keys: str) -> None:
        self.run("send-keys", *keys)

    def wait_for(self, pattern: str) -> None:
        """Waits until it shows something new that matches."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, self._seen)):
            assert time.monotonic() < deadline, self._seen
            if select.select([self._fd], [], [], 0.1)[0]:
                more = os.read(self._fd, 1 << 16).decode(errors="replace")
                self._seen = _CONTROLS.sub("", self._seen + more)
        self._seen = self._seen[found.end() :]

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True)
        os.close(self._fd)


@pytest.fixture
def terminal(here: Place, tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path, " ".join(here.command("ssh", "hello")))
    try:
        yield terminal
    finally:
        terminal.close()


def test_an_interactive_shell(terminal: Terminal) -> None:
    """Prompt, size and its change, ^C, and the exit code."""
    terminal.wait_for("[$#] ")
    terminal.type("PS1='ready> '", "Enter")
    terminal.wait_for("\nready> ")
    terminal.type("stty size; tty", "Enter")
    terminal.wait_for(r"\n24 80\n/dev/pts/\d+\nready> ")
    terminal.run("resize-window", "-x", "100", "-y", "30")
    terminal.type("stty size", "Enter")
    terminal.wait_for("\n30 100\nready> ")
    terminal.type("sh -c 'printf begun; exec sleep 1000'", "Enter")
    terminal.wait_for("\nbegun")
    terminal.type("C-c")
    terminal.wait_for("\nready> ")
    terminal.type("echo code $?", "Enter")
    terminal.wait_for("\ncode 130\nready> ")
    terminal.type("exit 3", "Enter")
    terminal.wait_for(r"\nConnection to \S+ closed\.\n")
    terminal.wait_for("ended with 3\n")


# Files.


@pytest.fixture
def body(tmp_path: Path) -> Iterator[Path]:
    yield random_file(tmp_path / "body", MUCH_BYTES)
    for file in tmp_path.rglob("*"):
        if file.is_file():
            file.unlink()  # pytest keeps the folders of three runs


def quiet(command: list[str], stdin: bytes = b"") -> None:
    """Runs a program that has nothing to say."""
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("protocol", ["-s", "-O"], ids=["by sftp", "by its own protocol"])
def test_scp_both_ways(here: Place, body: Path, tmp_path: Path, protocol: str) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    quiet(here.command("scp", "-q", protocol, body, f"hello:{there}"))
    quiet(here.command("scp", "-q", protocol, f"hello:{there}", back))
    assert sha256(there) == sha256(back) == sha256(body)


def test_sftp_both_ways(here: Place, body: Path, tmp_path: Path) -> None:
    there, moved, back = (tmp_path / name for name in ("there", "moved", "back"))
    batch = f"put {body} {there}\nget {there} {back}\nrename {there} {moved}\n"
    quiet(here.command("sftp", "-q", "-b", "-", "hello"), batch.encode())
    assert sha256(moved) == sha256(back) == sha256(body)
    assert not there.exists()


def test_rsync_both_ways(here: Place, body: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    rsync = [find_program("rsync"), "-e", " ".join(here.command("ssh"))]
    quiet([*rsync, str(body), f"hello:{there}"])
    quiet([*rsync, f"hello:{there}", str(back)])
    assert sha256(there) == sha256(back) == sha256(body)


# Forwards.


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S)


def connect_by_socks(port: int, to: int) -> socket.socket:
    """SOCKS5 without a password, to a port of loopback (RFC 1928)."""
    sock = connect(port)
    sock.sendall(b"\5\1\0")
    assert sock.recv(2, socket.MSG_WAITALL) == b"\5\0"
    sock.sendall(b"\5\1\0\1\x7f\0\0\1" + to.to_bytes(2, "big"))
    assert sock.recv(10, socket.MSG_WAITALL)[:2] == b"\5\0"
    return sock


def comes_back(dial: Callable[[], socket.socket]) -> None:
    """Holds that what is sent to an echo comes back whole, and its end too."""
    sent = os.urandom(TRANSFER_BYTES)
    with dial() as sock, ThreadPoolExecutor(1) as sending:

        def send() -> None:
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)

        sender = sending.submit(send)
        received = bytearray()
        while data := sock.recv(1 << 18):
            received += data
        sender.result()
    assert received == sent


@contextmanager
def standing(here: Place, *flags: str) -> Iterator[None]:
    """An ssh without a command, whose forwards are there."""
    command = here.command("ssh", "-N", "-v", "-o", "ExitOnForwardFailure=yes", *flags, "hello")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            awaited = {"Entering interactive session", "remote forward success"}
            for line in process.stderr:
                awaited -= {words for words in awaited if words in line}
                if not awaited:
                    break
            assert not awaited, "ssh ended by itself"
            with ThreadPoolExecutor(1) as reading:
                reading.submit(process.stderr.read)
                yield
                process.terminate()
        finally:
            process.kill()


def test_forwards_of_all_kinds_at_once(here: Place) -> None:
    local, remote, socks = free_port(), free_port(), free_port()
    with App(echo) as app, App(echo) as own:
        flags = ("-L", f"{local}:{app.address}", "-R", f"{remote}:{own.address}", "-D", str(socks))
        with standing(here, *flags), ThreadPoolExecutor(3 * TRANSFERS) as clients:
            dials: list[Callable[[], socket.socket]] = [
                lambda: connect(local),
                lambda: connect(remote),
                lambda: connect_by_socks(socks, app.address.port),
            ]
            transfers = [clients.submit(comes_back, dial) for dial in dials for _ in range(TRANSFERS)]
            for transfer in transfers:
                transfer.result(PATIENCE_S)
        assert (app.connections, own.connections) == (2 * TRANSFERS, TRANSFERS)


# Many.


def test_many_sessions_at_once(here: Place) -> None:
    pipe = subprocess.PIPE
    command = here.command("ssh", "hello", "echo ready; cat")
    with ExitStack() as block:
        sessions = []
        for _ in range(SESSIONS):
            session = block.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe))
            block.callback(session.kill)
            sessions.append(session)
        for session in sessions:
            assert session.stdout is not None
            assert session.stdout.readline() == b"ready\n"
        # All are there at once now.
        for number, session in enumerate(sessions):
            out, err = session.communicate(b"%d" % number, timeout=PATIENCE_S)
            assert (session.returncode, out, err) == (0, b"%d" % number, b"")

"""A session of the built-in sshd (RFC 4254 section 6): a shell, a command, or files by sftp or scp.

All of them are child processes. Files are served by the image's programs, where it has them, else by
`agent.ssh.file_server`: disks must not stop krun's event loop.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from asyncssh import SSHServerChannel, SSHServerSession

from agent.ssh import login
from agent.ssh.audit import Activity, Client, Kind, shortened
from agent.ssh.processes import CONNECTION
from agent.ssh.program import Program, Terminal
from shared.errors import UnavailableError
from shared.tasks import spawn

if TYPE_CHECKING:
    from agent.ssh.login import Login

SFTP = "sftp"

SFTP_SERVERS = (
    "/usr/lib/openssh/sftp-server",
    "/usr/libexec/openssh/sftp-server",
    "/usr/libexec/sftp-server",
    "/usr/lib/ssh/sftp-server",
)
"""Of Debian, Fedora, Alpine and others."""

EXIT_NOT_STARTED = 127

_SIGNALS = {
    *("ABRT", "ALRM", "FPE", "HUP", "ILL", "INT", "KILL", "PIPE", "QUIT", "SEGV", "TERM", "USR1", "USR2")
}
"""Those that the protocol has names for (RFC 4254 section 6.10)."""


class Session(SSHServerSession[bytes]):
    """One."""

    _channel: SSHServerChannel[bytes]

    def __init__(
        self,
        client: Client,
        user: Login,
        environ: Mapping[str, str],
        ends: str,
        over: Callable[[], None],
        runs: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """`environ` is that of all sessions, `ends` what SSH_CONNECTION says. `over()` is called once its
        channel is closed, `runs(task)` gets the task that runs its program."""
        self._over = over
        self._runs = runs
        self._client = client
        self._user = user
        self._environ = environ
        self._ends = ends
        self._terminal: Terminal | None = None
        self._kind: Kind = "shell"
        self._command = ""
        self._program: Program | None = None
        self._early: list[bytes] = []  # what came before the program was there; a window at most
        self._ended_early = False
        self._paused = False
        self._lost = False
        self._activity: Activity | None = None

    # What the client asks for.

    def connection_made(self, chan: SSHServerChannel[bytes]) -> None:
        self._channel = chan

    def pty_requested(
        self, term_type: str, term_size: tuple[int, int, int, int], term_modes: Mapping[int, int]
    ) -> bool:
        self._terminal = Terminal(term_type, term_size[:2], term_modes)
        return True

    def shell_requested(self) -> bool:
        return True

    def exec_requested(self, command: str) -> bool:
        self._command = command
        self._kind = "scp" if command.startswith("scp -") else "exec"
        return True

    def subsystem_requested(self, subsystem: str) -> bool:
        self._kind = "sftp"
        return subsystem == SFTP

    def session_started(self) -> None:
        self._runs(spawn(self._run(), name=f"ssh {self._client.number}: {self._kind}"))

    # From the client.

    def data_received(self, data: bytes, datatype: int | None) -> None:
        if self._program is None:
            self._early.append(data)
            return
        assert self._activity is not None
        self._activity.received += len(data)
        if not self._program.write(data):
            self._channel.pause_reading()

    def eof_received(self) -> bool:
        if self._program is None:
            self._ended_early = True
        else:
            self._program.end_input()
        return True  # what the program writes is still to come

    def terminal_size_changed(self, width: int, height: int, pixwidth: int, pixheight: int) -> None:
        if self._terminal is not None:
            self._terminal.size = (width, height)
        if self._program is not None:
            self._program.resize((width, height))

    def signal_received(self, signal: str) -> None:
        number = _number(signal)
        if self._program is not None and number is not None:
            self._program.send(number)

    def break_received(self, msec: int) -> bool:
        return False

    def pause_writing(self) -> None:
        self._paused = True
        if self._program is not None:
            self._program.pause()

    def resume_writing(self) -> None:
        self._paused = False
        if self._program is not None:
            self._program.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._over()
        if self._program is not None:
            spawn(self._program.kill(), name=f"end of ssh {self._client.number}")

    # The program.

    async def _run(self) -> None:
        activity = self._activity = self._client.begin(self._kind, shortened(self._command))
        how = "not started,"
        try:
            try:
                program = await self._start()
            except UnavailableError as error:
                how = f"not started ({error}),"
                self._tell(f"krun: {error}\r\n".encode())
                self._exit(EXIT_NOT_STARTED)
                return
            self._program = program
            if self._lost:
                await program.kill()
            else:
                self._catch_up(program)
            code = await program.wait()
            how = f"exit code {code}" if code >= 0 else f"killed by SIG{_name(-code)}"
            if self._lost:
                how = f"client left, {how},"
            self._exit(code)
        finally:
            activity.end(how)

    def _catch_up(self, program: Program) -> None:
        """With what has come while it was started."""
        if self._paused:
            program.pause()
        takes = True
        for data in self._early:
            assert self._activity is not None
            self._activity.received += len(data)
            takes = program.write(data)
        self._early.clear()
        if self._ended_early:
            program.end_input()
        if not takes:
            self._channel.pause_reading()

    async def _start(self) -> Program:
        return await Program.start(
            self._words(),
            self._user,
            self._environment(),
            terminal=self._terminal,
            output=self._output,
            errors=self._errors,
            drained=self._drained,
        )

    def _words(self) -> list[str]:
        """What is executed. Raises UnavailableError."""
        shell = self._user.shell
        if self._kind == "sftp":
            server = next((path for path in SFTP_SERVERS if os.access(path, os.X_OK)), None)
            return [server] if server else self._our_files(SFTP)
        if self._kind == "scp" and shutil.which("scp", path=self._environ.get("PATH")) is None:
            return self._our_files(self._command)
        if self._kind == "shell":
            if not shell:
                raise UnavailableError("the image has no shell; commands without one run: ssh HOST COMMAND")
            return [shell, "-l"]
        if shell:
            return [shell, "-c", self._command]
        try:
            words = shlex.split(self._command)
        except ValueError as error:
            raise UnavailableError(f"the image has no shell, and the command's quotes: {error}") from None
        if not words:
            raise UnavailableError("an empty command")
        found = shutil.which(words[0], path=self._environ.get("PATH"))
        if found is None:
            raise UnavailableError(f"the image has no shell, and no program {words[0]}")
        return [found, *words[1:]]

    def _our_files(self, command: str) -> list[str]:
        version = str(self._channel.get_extra_info("connection").get_extra_info("client_version", ""))
        return [sys.executable, "-I", "-m", "agent.ssh.file_server", command, version]

    def _environment(self) -> dict[str, str]:
        sent = {_text(name): _text(value) for name, value in self._channel.get_environment_bytes().items()}
        peer_host, peer_port, _, own_port = self._ends.split()
        environ = {
            **self._environ,
            **login.allowed(sent),
            CONNECTION: self._ends,
            "SSH_CLIENT": f"{peer_host} {peer_port} {own_port}",
        }
        if self._terminal is not None:
            environ["TERM"] = self._terminal.kind or "dumb"
        if (agent := self._channel.get_agent_path()) is not None:
            environ["SSH_AUTH_SOCK"] = agent
        return environ

    # To the client.

    def _output(self, data: bytes) -> None:
        if not self._lost:
            assert self._activity is not None
            self._activity.sent += len(data)
            self._channel.write(data)

    def _errors(self, data: bytes) -> None:
        if not self._lost:
            self._tell(data)

    def _tell(self, data: bytes) -> None:
        if not self._lost:
            assert self._activity is not None
            self._activity.sent += len(data)
            self._channel.write_stderr(data)

    def _drained(self) -> None:
        if not self._lost:
            self._channel.resume_reading()

    def _exit(self, code: int) -> None:
        if self._lost:
            return
        name = "" if code >= 0 else _name(-code)
        if name in _SIGNALS:
            self._channel.exit_with_signal(name)
        else:
            self._channel.exit(code if code >= 0 else 128 - code)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:  # a real-time signal
        return str(number)


def _number(name: str) -> int | None:
    try:
        return signal.Signals[f"SIG{name}"] if name in _SIGNALS else None
    except KeyError:
        return None


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")

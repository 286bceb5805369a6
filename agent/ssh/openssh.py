"""OpenSSH's sshd of the image, a process for each connection (`sshd -i`): krun has the port, the bounds and
the log, and nothing runs while nobody is connected.

As another user than root it can serve that user only, whose shell is that of /etc/passwd. Its files are in a
folder of krun's own; it reads the authorized keys as the user of the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import logging
import os
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agent.config.public_keys import AuthorizedKey
from agent.ssh import processes
from agent.ssh.audit import LOGIN_S, MAX_ATTEMPTS, MAX_SESSIONS, Activity, Client, Kind, who
from agent.ssh.host_keys import HostKey
from agent.ssh.login import FROM_CLIENTS, Login
from shared import resource_limits
from shared.atomic_files import PRIVATE_MODE, PUBLIC_MODE, write_atomically
from shared.errors import UnavailableError
from shared.ops.repeated_log import RepeatedLog
from shared.tasks import spawn

log = logging.getLogger("hbone.ssh")

PROGRAM = "/usr/sbin/sshd"
CONFIG = "sshd_config"

CHECK_S = 5.0
"""For `sshd -t`."""

STOP_S = 1.0
"""After SIGTERM."""

LAST_WORDS_S = 1.0

RECORD_BYTES = 4096
"""Of what it logs at a time; it cuts it off at 1024 itself (OpenSSH, log.c)."""

SEPARATION_FOLDER = Path("/run/sshd")
"""Where it locks itself in as root (sshd(8), FILES)."""

_SHADOW = Path("/etc/shadow")

FOLDER_MODE = 0o711
"""For a user that is not krun's own to read the authorized keys."""

_DEFAULTS = ("HostKey", "HostCertificate", "AuthorizedKeysFile", "TrustedUserCAKeys", "LogLevel", "PidFile")
"""What a user's own sshd_config is given if it does not have it."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# What it says at LogLevel VERBOSE. From the start of a record: what clients choose comes later in it.
_ACCEPTED = re.compile(
    r"Accepted publickey for (\S+) from .* ssh2: (\S+) (SHA256:\S+)"
    r"(?: ID (.*) \(serial (\d+)\) CA \S+ (SHA256:\S+))?$"
)
_STARTING = re.compile(r"Starting session: (.+?)(?: on (\S+))? for (\S+) from \S+ port \d+ id (\d+)$")
_CLOSED = re.compile(r"Close session: user \S+ from \S+ port \d+ id (\d+)$")
_TRANSFERRED = re.compile(r"Transferred: sent (\d+), received (\d+) bytes$")
_ERROR = re.compile(r"(?:error|fatal): ")
_REFUSED = re.compile(r"(?:Failed \w+|Invalid user|Certificate invalid|User \S+ .*not allowed)\b")


class OpenSsh:
    """For one set of keys, made by `start`."""

    def __init__(
        self, folder: Path, comments: Mapping[str, str], environ: Callable[[], Mapping[str, str]]
    ) -> None:
        self._folder = folder
        self._comments = comments
        self._environ = environ
        self._lines: list[tuple[str, object]] | None = None  # of our own configuration
        self._written = ""
        self._flags: list[str] = []
        self._serves = 0
        self._closed = False
        self._warnings = RepeatedLog(log)

    @classmethod
    async def start(
        cls,
        keys: Sequence[AuthorizedKey],
        host_keys: Sequence[HostKey],
        user: Login,
        environ: Callable[[], Mapping[str, str]],
        own_config: str = "",
    ) -> OpenSsh:
        """Lays out its files. `environ` is asked for that of a session. `own_config` is a user's sshd_config,
        which is taken as it is. Raises UnavailableError with the reason why it cannot serve."""
        _check(user)
        folder = Path(tempfile.mkdtemp(prefix="krun-sshd-"))
        made = cls(folder, {key.fingerprint: key.comment for key in keys}, environ)
        try:
            os.chmod(folder, FOLDER_MODE)
            lines = _with_files(folder, keys, host_keys)
            if own_config:
                told = _keywords(own_config)
                for keyword, value in lines:
                    if keyword in _DEFAULTS and keyword.lower() not in told:
                        made._flags += ["-o", f"{keyword}={value}"]
                write_atomically(folder / CONFIG, own_config.encode(), PRIVATE_MODE)
            else:
                made._lines = [*lines, *_rules(user)]
                made._write_config()
            await made._check_config()
        except BaseException as error:
            made.close()
            if isinstance(error, OSError):
                raise UnavailableError(f"its files cannot be written: {error.strerror or error}") from error
            raise
        return made

    async def serve(self, sock: socket.socket, client: Client) -> None:
        """Serves a connection to its end; cancelled, it ends it. The socket is closed then."""
        self._serves += 1
        try:
            await self._serve(sock, client)
        finally:
            self._serves = max(0, self._serves - 1)
            self._clean_up()

    async def _serve(self, sock: socket.socket, client: Client) -> None:
        peer, own = sock.getpeername(), sock.getsockname()
        connection = f"{peer[0]} {peer[1]} {own[0]} {own[1]}"
        # What it logs has words of clients in it, newlines among them, before anybody has logged in. A socket
        # keeps its records apart, where a pipe would let a client write lines.
        told, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told.setblocking(False)
        with sock, its:
            sock.setblocking(True)
            try:
                self._write_config()
                with resource_limits.as_started():
                    process = await asyncio.create_subprocess_exec(
                        *(PROGRAM, "-i", "-e", "-f", str(self._folder / CONFIG), *self._flags),
                        stdin=sock.fileno(),
                        stdout=sock.fileno(),
                        stderr=its.fileno(),
                        env={"PATH": os.defpath},
                        start_new_session=True,
                    )
            except BaseException as error:
                told.close()
                if not isinstance(error, OSError):
                    raise
                client.end(f"cannot start {PROGRAM}: {error.strerror}")
                return
        reading = spawn(self._read(told, client), name=f"log of ssh {client.number}")
        try:
            await process.wait()
        finally:
            await _stop(process)
            await asyncio.wait({reading}, timeout=LAST_WORDS_S)
            reading.cancel()
            await processes.end(lambda: processes.attached(connection))

    def close(self, *, at_once: bool = False) -> None:
        """Removes its files, once nobody is served any more who may need them, or `at_once`."""
        self._warnings.close()
        self._closed = True
        if at_once:
            self._serves = 0
        self._clean_up()

    def _clean_up(self) -> None:
        if self._closed and not self._serves:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write_config(self) -> None:
        """As the app's environment is now. Raises OSError."""
        if self._lines is None:
            return
        environ = " ".join(
            _assignment(name, value) for name, value in self._environ().items() if _can_be_set(name, value)
        )
        lines = [*self._lines, ("SetEnv", environ)] if environ else self._lines
        text = "".join(f"{keyword} {value}\n" for keyword, value in lines)
        if text != self._written:
            content = text.encode("utf-8", "surrogateescape")
            write_atomically(self._folder / CONFIG, content, PRIVATE_MODE)
            self._written = text

    async def _check_config(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *(PROGRAM, "-t", "-f", str(self._folder / CONFIG), *self._flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.defpath},
        )
        try:
            async with asyncio.timeout(CHECK_S):
                _, told = await process.communicate()
        except TimeoutError:
            raise UnavailableError(f"sshd -t: no answer within {CHECK_S:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if process.returncode:
            lines = told.decode("utf-8", "replace").replace(f"{self._folder}/", "").splitlines()
            raise UnavailableError(f"sshd -t: {lines[0] if lines else 'no reason is told'}")

    # Its log.

    async def _read(self, told: socket.socket, client: Client) -> None:
        """All that it says, a record at a time; the socket is closed then."""
        with told:
            await self._read_records(told, client)

    async def _read_records(self, told: socket.socket, client: Client) -> None:
        loop = asyncio.get_running_loop()
        sessions: dict[str, Activity] = {}
        reason, moved = "", None
        while record := await loop.sock_recv(told, RECORD_BYTES):
            text = record.decode("utf-8", "replace").rstrip()
            log.debug("ssh %d: %s", client.number, text)
            if match := _ACCEPTED.match(text):
                client.logged_in(match[1], self._who(match))
            elif match := _STARTING.match(text):
                kind, what = _activity(match[1])
                sessions[match[4]] = client.begin(kind, what)
            elif match := _CLOSED.match(text):
                if (ended := sessions.pop(match[1], None)) is not None:
                    ended.end("closed", counted=False)
            elif match := _TRANSFERRED.match(text):
                moved = int(match[1]), int(match[2])
            elif _REFUSED.match(text):
                client.attempts += 1
                reason = text
            elif _ERROR.match(text):
                reason = text
                self._warnings.warning("sshd", f"sshd: {text}")
        for left in list(client.activities):
            left.end("closed", counted=False)
        if client.who and moved is not None:
            log.info("ssh %d: connection ends: %d bytes sent, %d received", client.number, *moved)
        client.end(reason)

    def _who(self, match: re.Match[str]) -> str:
        certificate = None if match[4] is None else (match[4], match[5], match[6])
        return who(match[3], self._comments, certificate)


def _activity(told: str) -> tuple[Kind, str]:
    """Of what it says that it starts. It does not tell the command."""
    if told.startswith("shell"):
        return "shell", ""
    if told.startswith("subsystem") and "'sftp'" in told:
        return "sftp", ""
    return "exec", "" if told.startswith("command") else told


def _check(user: Login) -> None:
    """Raises UnavailableError if it could not let the user in."""
    if not os.access(PROGRAM, os.X_OK):
        raise UnavailableError(f"the image has no {PROGRAM}")
    if not user.in_passwd:
        raise UnavailableError(f"user {user.name} is not in /etc/passwd")
    if not user.has_own_shell:
        raise UnavailableError(f"user {user.name} has no login shell in /etc/passwd")
    if os.geteuid() != 0:
        if not _terminals_are_right():
            raise UnavailableError("without root it cannot give terminals to the group tty, and would end")
        return
    try:
        SEPARATION_FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise UnavailableError(f"cannot make {SEPARATION_FOLDER}: {error.strerror}") from error
    if _is_locked(user.name):
        raise UnavailableError(f"the account of user {user.name} is locked (! in {_SHADOW})")


def _terminals_are_right() -> bool:
    """Whether a new terminal has the group that sshd wants it to have: another one it changes, as root, or
    gives up (OpenSSH, sshpty.c)."""
    try:
        group = grp.getgrnam("tty").gr_gid
        ours, its = os.openpty()
    except (KeyError, OSError):
        return True
    try:
        return os.fstat(its).st_gid == group
    finally:
        os.close(ours)
        os.close(its)


def _is_locked(name: str) -> bool:
    """Whether sshd takes an account for locked, if PAM does not decide it."""
    try:
        lines = _SHADOW.read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    return any(line.startswith(f"{name}:!") for line in lines)


def _with_files(
    folder: Path, keys: Sequence[AuthorizedKey], host_keys: Sequence[HostKey]
) -> list[tuple[str, object]]:
    """The lines of the configuration about files, which are written. Raises OSError."""
    lines: list[tuple[str, object]] = []
    for number, key in enumerate(host_keys):
        file = folder / f"host_key_{number}"
        write_atomically(file, key.private, PRIVATE_MODE)
        lines.append(("HostKey", file))
        if key.certificate:
            certificate = folder / f"host_key_{number}-cert.pub"
            write_atomically(certificate, f"{key.certificate}\n".encode(), PUBLIC_MODE)
            lines.append(("HostCertificate", certificate))
    # In a line of authorized keys an authority may sign for nobody in particular; here it may not.
    plain = [key for key in keys if key.is_authority and len(key.options) == 1]
    if plain:
        file = folder / "authorities"
        told = "".join(f"{key.line().partition(' ')[2]}\n" for key in plain)
        write_atomically(file, told.encode(), PUBLIC_MODE)
        lines.append(("TrustedUserCAKeys", file))
    file = folder / "authorized_keys"
    others = "".join(f"{key.line()}\n" for key in keys if key not in plain)
    write_atomically(file, others.encode(), PUBLIC_MODE)
    return [*lines, ("AuthorizedKeysFile", file), ("LogLevel", "VERBOSE"), ("PidFile", "none")]


def _rules(user: Login) -> list[tuple[str, object]]:
    """The other lines of krun's own configuration."""
    accepted = " ".join(f"{name}*" for name in FROM_CLIENTS)
    return [
        # Its folder is krun's, below a /tmp that everybody may write to.
        ("StrictModes", "no"),
        ("AuthenticationMethods", "publickey"),
        ("PubkeyAuthentication", "yes"),
        ("PasswordAuthentication", "no"),
        ("KbdInteractiveAuthentication", "no"),
        ("UsePAM", "no"),
        ("PermitRootLogin", "prohibit-password" if user.uid == 0 else "no"),
        ("AllowUsers", user.name),
        ("LoginGraceTime", int(LOGIN_S)),
        ("MaxAuthTries", MAX_ATTEMPTS),
        ("MaxSessions", MAX_SESSIONS),
        ("AllowAgentForwarding", "yes"),
        ("AllowTcpForwarding", "yes"),
        ("AllowStreamLocalForwarding", "yes"),
        ("GatewayPorts", "no"),
        ("X11Forwarding", "no"),
        ("PermitTunnel", "no"),
        ("PermitUserEnvironment", "no"),
        ("PermitUserRC", "no"),
        ("UseDNS", "no"),
        ("PrintMotd", "no"),
        ("PrintLastLog", "no"),
        ("AcceptEnv", accepted),
        ("Subsystem", "sftp internal-sftp"),
    ]


def _can_be_set(name: str, value: str) -> bool:
    """Whether a line of its configuration can say it."""
    return _VARIABLE.fullmatch(name) is not None and not {"\n", "\r", "\0"} & set(value)


def _assignment(name: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{name}={escaped}"'


def _keywords(config: str) -> set[str]:
    """Those that a configuration has for everybody, in lower case (sshd_config(5))."""
    found = set()
    for line in config.splitlines():
        words = re.split(r"[\s=]+", line.strip(), maxsplit=1)
        keyword = words[0].lower()
        if keyword == "match":
            break
        if keyword and not keyword.startswith("#"):
            found.add(keyword)
    return found


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ends it with those of its own that have no session of theirs."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()

"""Ends what ssh sessions have started, found by what the kernel tells of each process (proc(5)).

1. A session has a session of the kernel's to itself: its leader is the shell or the command. All of it ends
   with the leader, or when the client leaves: SIGHUP, and SIGKILL to what is still there after GRACE_S.
2. What has left that session for one of its own, and reads from /dev/null, as daemons and a tmux server do,
   stays. So do the processes that it starts. They end with krun.
3. Processes of a connection, or of all of them, are known by SSH_CONNECTION in their environment, which both
   kinds of sshd set.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from typing import NamedTuple

GRACE_S = 2.0
"""Seconds after SIGHUP."""

CONNECTION = "SSH_CONNECTION"

MAX_ENVIRONMENT_BYTES = 1 << 20
"""Of a process's environment that is searched."""

_NOWHERE = "/dev/null"


class Found(NamedTuple):
    """A process."""

    pid: int
    parent: int
    session: int
    """The process id of its session's leader."""


def in_session(leader: int) -> list[int]:
    """The processes in the session of `leader`, itself included."""
    return [found.pid for found in _all() if found.session == leader]


def of_connection(ends_with: str) -> list[int]:
    """The processes with an SSH_CONNECTION that is `ends_with` or ends so, daemons included."""
    return [found.pid for found in _marked(ends_with)]


def attached(connection: str) -> list[int]:
    """The processes of the connection with that SSH_CONNECTION, without daemons (rule 2)."""
    marked = {found.pid: found for found in _marked(connection)}
    return [pid for pid in marked if not _is_daemons(pid, marked)]


def _is_daemons(pid: int, marked: dict[int, Found]) -> bool:
    for _ in range(len(marked) + 1):
        found = marked.get(pid)
        if found is None:
            return False
        leader = marked.get(found.session)
        if leader is None:
            return False  # it ended, and left this one behind
        if _stdin(leader.pid) == _NOWHERE:
            return True
        pid = leader.parent
    return False


async def end(find: Callable[[], Iterable[int]]) -> None:
    """Ends the processes that `find` finds, which is asked again after a while."""
    if not send(signal.SIGHUP, find()):
        return
    loop = asyncio.get_running_loop()
    deadline = loop.time() + GRACE_S
    pause_s = 0.01
    while find():
        if loop.time() >= deadline:
            send(signal.SIGKILL, find())
            return
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.2)


def send(signum: int, pids: Iterable[int]) -> int:
    """Sends a signal to each; returns to how many."""
    count = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
            count += 1
    return count


def _marked(ends_with: str) -> list[Found]:
    own = os.environ.get(CONNECTION, "")  # of krun that a session has started, and its app
    found = []
    for one in _all():
        connection = _connection(one.pid)
        if connection.endswith(ends_with) and connection != own:
            found.append(one)
    return found


def _all() -> list[Found]:
    """Those that run: one that has ended, and that nobody has waited for, is left out."""
    found = []
    own = os.getpid()
    with contextlib.suppress(OSError):  # no /proc
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) != own and (one := _stat(entry.name)) is not None:
                found.append(one)
    return found


def _stat(pid: str) -> Found | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            told = file.read(4096)
    except OSError:
        return None
    # The program's name is in brackets and may have some itself. Behind it: state, parent, group, session.
    state, parent, _, session = told.rpartition(b")")[2].split()[:4]
    return None if state in (b"Z", b"X") else Found(int(pid), int(parent), int(session))


def _connection(pid: int) -> str:
    """The value of SSH_CONNECTION; empty: it has none, or we may not look."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            told = file.read(MAX_ENVIRONMENT_BYTES)
    except OSError:
        return ""
    prefix = f"{CONNECTION}=".encode()
    for variable in told.split(b"\0"):
        if variable.startswith(prefix):
            return variable.removeprefix(prefix).decode("ascii", "replace")
    return ""


def _stdin(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/0")
    except OSError:
        return ""

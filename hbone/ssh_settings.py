"""What ssh has to be told to go through a tunnel of ours: for its command line, and for ~/.ssh/config.

Nothing here asks anybody: what a service's name means is for the `hbone connect` that ssh starts.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from shared.errors import UsageError

KEEPALIVE = {"ServerAliveInterval": "30", "ServerAliveCountMax": "3"}
"""Ends a session whose sshd is gone though the way to its container is not. For that way hbone's own PING is
quicker, and says more (`--keepalive`)."""

CHECKED_KEY = {"StrictHostKeyChecking": "accept-new"}
"""The first host key is taken without a question, for TLS has proved the service that shows it; another one
later is refused."""

ANY_KEY = {"StrictHostKeyChecking": "no", "UserKnownHostsFile": os.devnull, "LogLevel": "ERROR"}
"""For sshds that make a key at each start. Without the level, each session begins with a warning."""

_NOT_IN_HOSTS = frozenset(" '\"$\\;&<>|(){},*?!%#=@")
"""What ssh, its patterns or a line of known_hosts would take for something else."""


def own_command() -> list[str]:
    """The words that start this very command, whatever PATH or working directory they meet."""
    program = os.path.abspath(
        sys.argv[0]
    )  # a link, as pipx makes one, stays a link: what it leads to may move
    if os.path.basename(program) == "hbone" and os.path.isfile(program) and os.access(program, os.X_OK):
        return [program]
    return [sys.executable, "-P", "-m", "hbone"]


def split_user(text: str) -> tuple[str, str]:
    """[USER@]SERVICE as user and service; the user is empty if none is named."""
    user, _, service = text.rpartition("@")
    return ("", text) if "/" in user else (user, service)


def host_of(service: str) -> str:
    """A service's name or URL as known_hosts is to have it: without scheme, path, port and the cluster's
    domain, so that there is one entry, however the service is written.

    Raises:
        UsageError: `service` has no such name.
    """
    _, separator, rest = service.partition("://")
    host = (rest if separator else service).partition("/")[0].lower()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    host = host.removesuffix(".cluster.local").removesuffix(".svc")
    if (
        not host
        or host.startswith("-")
        or not (host.isascii() and host.isprintable())
        or _NOT_IN_HOSTS & set(host)
    ):
        raise UsageError(f"{service!a}: write a URL, HOST:PORT or SERVICE.NAMESPACE, and USER@ before it")
    return host


def of_service(flags: Sequence[str], service: str, *, any_key: bool) -> dict[str, str]:
    """Names and values of ssh_config(5) for `service`; `flags` are for its tunnel.

    Raises:
        UsageError: `service`, or a flag, is nothing that ssh can be told.
    """
    alias = host_of(service)
    return {
        "ProxyCommand": _proxy_command(flags, _quoted(service)),
        "HostKeyAlias": alias,
        **_common(any_key),
    }


def of_all(flags: Sequence[str], *, any_key: bool) -> dict[str, str]:
    """The same for whatever host ssh is asked for, if it has no quote. Raises UsageError for a flag."""
    return {"ProxyCommand": _proxy_command(flags, "'%h:%p'"), **_common(any_key)}


def _proxy_command(flags: Sequence[str], target: str) -> str:
    """A line that the user's shell reads, after ssh has looked for its %-tokens."""
    line = " ".join([*map(_quoted, (*own_command(), "connect", *flags)), target])
    if not line.isprintable():
        raise UsageError(
            "a flag, or the path of hbone, has a character that no line of ssh's settings can have"
        )
    return line


def _quoted(word: str) -> str:
    # ssh counts a line's quotes, though it keeps them. To it a backslash escapes one in either kind of them,
    # to a shell in double ones only.
    return shlex.quote(word).replace("\\", "'\"\\\\\"'").replace("%", "%%")


def _common(any_key: bool) -> dict[str, str]:
    return {**KEEPALIVE, **(ANY_KEY if any_key else CHECKED_KEY)}

"""What -L, -R and -D say: text in, places out. As for ssh, but that krun knows a target by name.

Without an address a port is on 127.0.0.1. What has a slash in it is the path of a unix socket.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.address import MAX_PORT, Address
from shared.errors import UsageError
from shared.tunnel.tunnel_request import TUNNEL_PREFIX, target_name

LOOPBACK = "127.0.0.1"

REMOTE_HOSTS = (LOOPBACK, "localhost")
"""Where a port in the container may be: nobody else is to reach a user's machine through it."""

MAX_SOCKET_PATH = 103
"""Bytes of a unix socket's path on macOS, without the 0 at its end; Linux has 107 (unix(7))."""

Place = Address | Path
"""A TCP address, or the path of a unix socket."""


@dataclass(frozen=True, slots=True)
class LocalForward:
    """-L: what is accepted at `listen` goes to a target in the container."""

    listen: Place
    target: str
    """The name that krun knows it by; empty: the one in the URL."""


@dataclass(frozen=True, slots=True)
class RemoteForward:
    """-R: what is accepted in the container, on its loopback, goes to `target` on this side."""

    port: int
    target: Place


def local_forward(text: str) -> LocalForward:
    """Reads `[ADDR:]PORT[:TARGET]` or `PATH[:TARGET]`. Raises UsageError."""
    listen, target = _listen("-L", text)
    if target and not target_name(f"{TUNNEL_PREFIX}{target}".encode("utf-8", "replace")):
        raise UsageError(
            f"-L {text}: the target {target!a} is no name that krun can have; it is a port that krun serves, "
            "such as 22, or NAME of a variable PORT_NAME in the container"
        )
    return LocalForward(listen, target)


def listening(flag: str, text: str) -> Place:
    """Reads `[ADDR:]PORT` or `PATH`, the value of `flag`. Raises UsageError."""
    listen, rest = _listen(flag, text)
    if rest:
        raise UsageError(f"{flag} {text}: write [ADDR:]PORT or the path of a unix socket")
    return listen


def remote_forward(text: str) -> RemoteForward:
    """Reads `[ADDR:]PORT:TARGET`, with HOST:PORT, PORT or PATH as TARGET. Raises UsageError."""
    first, _, rest = text.partition(":")
    if not first.isdigit():
        if first not in REMOTE_HOSTS:
            raise UsageError(
                f"-R {text}: in the container only 127.0.0.1 can be listened on; write PORT:TARGET"
            )
        first, _, rest = rest.partition(":")
    port = _port("-R", text, first)
    if port == 0:
        raise UsageError(f"-R {text}: port 0 cannot be asked for; krun allows ports by number")
    if not rest:
        raise UsageError(f"-R {text}: no target; write PORT:HOST:PORT")
    if "/" in rest:
        return RemoteForward(port, _path("-R", text, rest))
    target = _address("-R", text, f"{LOOPBACK}:{rest}" if rest.isdigit() else rest)
    if target.port == 0:
        raise UsageError(f"-R {text}: port 0 cannot be connected to")
    return RemoteForward(port, target)


def _listen(flag: str, text: str) -> tuple[Place, str]:
    """Where to listen, and what follows behind a colon."""
    if text.startswith("["):
        host, bracket, rest = text.partition("]:")
        if not bracket:
            raise UsageError(f"{flag} {text}: write [IPV6]:PORT")
        port, _, target = rest.partition(":")
        return _address(flag, text, f"{host}]:{port}"), target
    first, _, rest = text.partition(":")
    if "/" in first:
        return _path(flag, text, first), rest
    if first.isdigit():
        return Address(LOOPBACK, _port(flag, text, first)), rest
    port, _, target = rest.partition(":")
    return _address(flag, text, f"{first}:{port}"), target


def _address(flag: str, text: str, address: str) -> Address:
    try:
        return Address.parse(address)
    except ValueError as error:
        raise UsageError(f"{flag} {text}: {error}") from error


def _port(flag: str, text: str, port: str) -> int:
    if not (port.isascii() and port.isdigit()) or len(port) > len(str(MAX_PORT)) or int(port) > MAX_PORT:
        raise UsageError(f"{flag} {text}: {port!a} is no port; write a number in 0..{MAX_PORT}")
    return int(port)


def _path(flag: str, text: str, path: str) -> Path:
    if "\0" in path or len(path.encode("utf-8", "surrogateescape")) > MAX_SOCKET_PATH:
        raise UsageError(f"{flag} {text}: the path of a unix socket has at most {MAX_SOCKET_PATH} bytes")
    return Path(path)

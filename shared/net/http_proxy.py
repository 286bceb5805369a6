"""A connection through an HTTP proxy: CONNECT (RFC 9110 section 9.3.6) over HTTP/1.1.

The proxy looks the name up. Only the head of its answer is read, byte-exact: what follows is the far side's.
"""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import dataclass, field

from shared.address import Address
from shared.net.names import happy_eyeballs, names
from shared.net.names.endpoint import Resolve

MAX_HEAD_BYTES = 16 << 10
"""Of the proxy's answer; the pages that proxies send with a refusal are behind it."""

MAX_INTERIM = 4
"""Answers such as `100 Continue` before the one that counts (RFC 9110 section 15.2)."""

_HEAD_END = b"\r\n\r\n"

_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: |\r)")

_INTERIM = (b"HTTP/1.1 1", b"HTTP/1.0 1")

_CAUSES = {
    403: "it does not allow {target}",
    407: "it wants a user and a password: http://USER:PASSWORD@HOST:PORT",
    502: "it cannot reach {target}",
    503: "it cannot reach {target}",
    504: "it cannot reach {target}",
}


class ProxyError(OSError):
    """What the proxy refused, or why it cannot be used: `it ...`. `dial_http2` tells it like any failed
    connection, behind the proxy's name."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        """What it answered; None: nothing that could be read."""


@dataclass(frozen=True, slots=True)
class HttpProxy:
    """One that speaks HTTP without TLS: what goes through it is TLS anyway."""

    address: Address

    authorization: str = field(default="", repr=False)
    """The value of Proxy-Authorization; empty: none is sent."""

    def __str__(self) -> str:
        return f"proxy {self.address}"


async def connect(
    proxy: HttpProxy, target: Address, resolve: Resolve = names.resolve
) -> tuple[socket.socket, int]:
    """A connection to `target`, a non-blocking socket, the caller's to close; and the proxy's status. Has no
    deadline of its own. Raises ProxyError."""
    try:
        sock = await happy_eyeballs.dial(proxy.address, resolve)
    except OSError as error:
        raise ProxyError(f"it cannot be reached: {error.strerror or error}") from error
    try:
        return sock, await _tunnel(sock, proxy, target)
    except BaseException:
        sock.close()
        raise


async def _tunnel(sock: socket.socket, proxy: HttpProxy, target: Address) -> int:
    loop = asyncio.get_running_loop()
    name = Address(target.host.removesuffix("."), target.port)
    lines = [f"CONNECT {name} HTTP/1.1", f"host: {name}", "user-agent: hbone"]
    if proxy.authorization:
        lines.append(f"proxy-authorization: {proxy.authorization}")
    try:
        await loop.sock_sendall(sock, "\r\n".join([*lines, "", ""]).encode("ascii"))
        head = await _head(sock)
        for _ in range(MAX_INTERIM):
            if not (head.startswith(_INTERIM) and head.endswith(_HEAD_END)):
                break
            head = await _head(sock)
    except ConnectionError as error:
        raise ProxyError(f"it broke off: {error.strerror or error}") from error
    found = _STATUS.match(head)
    if found is None:
        raise ProxyError("it answered no HTTP/1.1; is it an HTTP proxy?" if head else "it broke off")
    status = int(found[1])
    if not 200 <= status < 300:
        cause = _CAUSES.get(status)
        raise ProxyError(f"it answered {status}{f': {cause.format(target=name)}' if cause else ''}", status)
    if not head.endswith(_HEAD_END):  # its rest would be taken for the far side's bytes
        what = "its headers are too long" if len(head) >= MAX_HEAD_BYTES else "it broke off in its headers"
        raise ProxyError(f"it answered {status}, but {what}", status)
    return status


async def _head(sock: socket.socket) -> bytes:
    """All up to the empty line, and no byte more; what has come, if it ends or is too long before that."""
    head = b""
    while len(head) < MAX_HEAD_BYTES:
        await _readable(sock)
        try:
            seen = sock.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            continue
        if not seen:
            return head
        end = (head + seen).find(_HEAD_END)
        took = sock.recv(len(seen) if end < 0 else end + 4 - len(head))
        head += took
        if end >= 0:
            break
    return head


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, _set, readable)
    try:
        await readable
    finally:
        loop.remove_reader(sock)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():  # it may be told twice
        future.set_result(None)

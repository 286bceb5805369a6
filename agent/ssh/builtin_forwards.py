"""Connections and ports that a client of the built-in sshd forwards (RFC 4254 section 7), and sockets of the
file system (OpenSSH, PROTOCOL section 2.4).

Whatever a client says, it listens on loopback. What krun can do as root, and the user of the sessions
cannot, it does not do: ports below 1024, and sockets in the file system.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

from asyncssh import ChannelOpenError, SSHListener, SSHServerConnection
from asyncssh.constants import OPEN_CONNECT_FAILED
from asyncssh.forward import SSHForwarder, SSHLocalPortForwarder
from asyncssh.listener import create_tcp_local_listener

from agent.ssh.audit import Activity, Client
from shared.address import Address
from shared.errors import DialError
from shared.net.dial import dial_socket, reason

log = logging.getLogger("hbone.ssh")

DIAL_S = 10.0

EVERYWHERE = ("", "*", "0.0.0.0", "::", "localhost", "127.0.0.1", "::1")
"""What a client may ask to listen on; it gets loopback for all of them, as with OpenSSH's GatewayPorts=no."""

FIRST_FREE_PORT = 1024


class Counted(SSHForwarder):
    """The container's end of a forwarded connection."""

    def __init__(self, activity: Activity) -> None:
        super().__init__()
        self._activity = activity

    def data_received(self, data: bytes, datatype: int | None = None) -> None:
        self._activity.sent += len(data)
        super().data_received(data, datatype)

    def write(self, data: bytes) -> None:
        self._activity.received += len(data)
        super().write(data)

    def close(self) -> None:
        self._activity.end("closed")
        super().close()


async def to_port(client: Client, host: str, port: int) -> SSHForwarder:
    """Connects to where a client asks for (-L, -D); what comes is the client's end of it. Raises
    ChannelOpenError."""
    try:
        address = Address.parse(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        sock = await dial_socket(address, DIAL_S)
    except (ValueError, DialError) as error:
        log.info("ssh %d: forward to %s port %d refused: %s", client.number, ascii(host), port, error)
        raise ChannelOpenError(OPEN_CONNECT_FAILED, str(error)) from None
    activity = client.begin("forward", f"to {address}")
    try:
        _, end = await asyncio.get_running_loop().create_connection(lambda: Counted(activity), sock=sock)
    except BaseException:
        sock.close()
        activity.end("failed")
        raise
    return SSHForwarder(end)


async def to_socket(client: Client, path: str) -> SSHForwarder:
    """The same to a socket of the file system."""
    loop = asyncio.get_running_loop()
    activity = client.begin("forward", f"to {path!a}")
    try:
        async with asyncio.timeout(DIAL_S):
            _, end = await loop.create_unix_connection(lambda: Counted(activity), path)
    except OSError as error:
        activity.end(f"failed, {reason(error)},")
        raise ChannelOpenError(OPEN_CONNECT_FAILED, f"connect to {path}: {reason(error)}") from None
    return SSHForwarder(end)


class _Accepted(SSHLocalPortForwarder):
    """A connection to a port that a client listens on. Nothing is read before the client has accepted it."""

    _accepted: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._accepted = cast(asyncio.Transport, transport)
        self._accepted.pause_reading()
        super().connection_made(transport)

    def accepted(self) -> None:
        """The client takes it."""
        if self._accepted is not None and not self._accepted.is_closing():
            self._accepted.resume_reading()


class Listening(SSHListener):
    """A port, until it is closed."""

    def __init__(self, listener: SSHListener, activity: Activity) -> None:
        super().__init__()
        self._listener = listener
        self._activity = activity

    def get_port(self) -> int:
        return self._listener.get_port()

    def close(self) -> None:
        self._activity.end("closed", counted=False)
        self._listener.close()

    async def wait_closed(self) -> None:
        await self._listener.wait_closed()


async def listen(
    connection: SSHServerConnection, client: Client, host: str, port: int, *, is_root: bool
) -> SSHListener | bool:
    """Listens for a client (-R); False: it may not. Raises OSError."""
    if host not in EVERYWHERE or (0 < port < FIRST_FREE_PORT and not is_root):
        log.info("ssh %d: may not listen on %s port %d", client.number, ascii(host), port)
        return False
    loop = asyncio.get_running_loop()
    listener: SSHListener | None = None

    def accept() -> asyncio.BaseProtocol:
        async def to_client(make: Callable[[], Any], peer_host: str, peer_port: int) -> Any:
            assert listener is not None
            opened = await connection.create_connection(
                make, host, port or listener.get_port(), peer_host, peer_port
            )
            loop.call_soon(end.accepted)
            return opened

        end = _Accepted(connection, to_client)
        return end

    listener = await create_tcp_local_listener(connection, loop, accept, "127.0.0.1", port)
    return Listening(listener, client.begin("listen", f"on 127.0.0.1:{listener.get_port()}"))

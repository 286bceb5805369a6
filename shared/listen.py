"""Listening sockets, with an error that names the port and what it was for."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable

from shared.address import Address
from shared.errors import UnavailableError

BACKLOG = 1024
"""Connections the kernel holds for us between two turns of the loop; a burst of clients is no error."""


async def listen(
    address: Address,
    factory: Callable[[], asyncio.BaseProtocol],
    *,
    purpose: str,
    tls: ssl.SSLContext | None = None,
    shared: bool = False,
) -> asyncio.Server:
    """Accepts connections on `address`, each given to a protocol of `factory`. Port 0 takes any free one.

    `shared` sets SO_REUSEPORT: other processes of the same user that set it as well may listen beside us, and
    the kernel deals the connections out (socket(7)).

    Raises:
        UnavailableError: the address cannot be had; the text says which, what for and why.
    """
    loop = asyncio.get_running_loop()
    try:
        return await loop.create_server(
            factory,
            address.host,
            address.port,
            backlog=BACKLOG,
            ssl=tls,
            reuse_address=True,
            reuse_port=shared,
        )
    except OSError as error:
        raise unavailable(purpose, address, error) from error


def unavailable(purpose: str, address: Address, error: OSError) -> UnavailableError:
    """Says why nobody can listen on `address`."""
    if error.errno == errno.EADDRINUSE:
        cause = "the port is in use"
    elif error.errno == errno.EACCES:
        cause = "not permitted (ports below 1024 need root)"
    else:
        cause = error.strerror or str(error)
    return UnavailableError(f"{purpose}: cannot listen on {address}: {cause}")


def bound_address(server: asyncio.Server) -> Address:
    """Where `server` really listens, for port 0."""
    name = server.sockets[0].getsockname()
    return Address(name[0], name[1])

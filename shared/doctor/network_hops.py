"""The two hops that every path has: the addresses of a name, and a TCP connection to one of them."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from shared.address import Address
from shared.doctor.failures import Failed, Failure
from shared.net.dial import reason
from shared.net.names import happy_eyeballs, names
from shared.net.names.endpoint import Endpoint

_DNS_FAULTS = {
    "no_name": Failure.NO_NAME,
    "no_address": Failure.NO_ADDRESS,
    "timeout": Failure.DNS_SILENT,
    "unreachable": Failure.DNS_SILENT,
}


async def addresses_of(address: Address) -> list[Endpoint]:
    """All endpoints of `address`. Has no deadline of its own. Raises Failed."""
    try:
        return await names.resolve(address)
    except OSError as error:
        fault = _DNS_FAULTS.get(str(getattr(error, "kind", "")), Failure.DNS_FAILED)
        raise Failed(fault, f"{address.host}: {reason(error)}") from error


def shown(address: Address, endpoints: Sequence[Endpoint]) -> str:
    """What a look-up has found, in words."""
    return f"{address.host}: {', '.join(str(name[0]) for _, name in endpoints)}"


async def connected(endpoints: Sequence[Endpoint], port: int) -> socket.socket:
    """A connection to one of `endpoints`, the caller's to close. Has no deadline of its own. Raises
    Failed."""
    try:
        return await happy_eyeballs.connect(endpoints)
    except TimeoutError as error:  # the kernel's, after its minutes
        raise Failed(Failure.TCP_SILENT, f"port {port}: {reason(error)}") from error
    except ConnectionRefusedError as error:
        raise Failed(Failure.TCP_REFUSED, f"port {port}: {reason(error)}") from error
    except OSError as error:
        raise Failed(Failure.TCP_UNREACHABLE, f"port {port}: {reason(error)}") from error


def peer_of(sock: socket.socket) -> str:
    """The far end of a connection in words."""
    host, port, *_ = sock.getpeername()
    return f"{host} port {port}"

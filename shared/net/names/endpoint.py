"""What a name is looked up for, and what it leads to."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence

from shared.address import Address

OURS = ""
"""The party of the names in our own settings, and of addresses."""

Endpoint = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]

Resolve = Callable[[Address], Awaitable[Sequence[Endpoint]]]
"""What looks a name up: `names.resolve`, or what stands in for it."""


def endpoint(ip: str, port: int) -> Endpoint:
    """That of an IP address, IPv6 without brackets."""
    if ":" in ip:
        return (socket.AF_INET6, (ip, port, 0, 0))
    return (socket.AF_INET, (ip, port))

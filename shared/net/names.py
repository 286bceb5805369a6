"""What every dial asks for the addresses of a name.

How names are looked up is `resolver.py`'s, which is imported with the first one: krun and
`hbone` often have addresses only, and start 4 ms sooner.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence

from shared.net.address import Address

OURS = ""
"""The party of the names in our own settings, and of addresses."""

Endpoint = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]

Resolve = Callable[[Address], Awaitable[Sequence[Endpoint]]]
"""What looks a name up: `resolve`, or what stands in for it."""


async def resolve(address: Address, party: str = OURS) -> list[Endpoint]:
    """All endpoints of `address`, at least one, families in turn, IPv6 first. Has no deadline of its own. The
    name is looked up at the expense of `party`.

    Raises:
        ResolveError: the name has no address, or nobody says which (an OSError).
        LimitError: too many names are being looked up for `party`.
    """
    if address.is_ip:
        return [endpoint(address.host, address.port)]
    from shared.net.resolver import current

    return await current().resolve(address, party)


def endpoint(ip: str, port: int) -> Endpoint:
    """That of an IP address, IPv6 without brackets."""
    if ":" in ip:
        return (socket.AF_INET6, (ip, port, 0, 0))
    return (socket.AF_INET, (ip, port))

"""The addresses of a name, for every dial.

The resolver is imported with the first name: krun and `hbone` often have addresses only, and start 4 ms
sooner.
"""

from __future__ import annotations

from shared.address import Address
from shared.net.names.endpoint import OURS, Endpoint, endpoint


async def resolve(address: Address, party: str = OURS) -> list[Endpoint]:
    """All endpoints of `address`, at least one, families in turn, IPv6 first. Has no deadline of its own. The
    name is looked up at the expense of `party`.

    Raises:
        ResolveError: the name has no address, or nobody says which (an OSError).
        LimitError: too many names are being looked up for `party`.
    """
    if address.is_ip:
        return [endpoint(address.host, address.port)]
    from shared.net.names.resolver import current

    return await current().resolve(address, party)

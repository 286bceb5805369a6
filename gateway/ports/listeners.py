"""The addresses that clients connect to: opened, changed by a reload, and given up without losing a client.

Other processes may listen on the same ports (SO_REUSEPORT).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from shared.address import Address
from shared.errors import HboneError, UnavailableError
from shared.listen import bound_address, listen
from shared.net.listen_close import close_listening, listening_on

log = logging.getLogger("hbone.gateway")

LISTENING = "listening"
"""What the log says of the ports of `listen:`."""

Key = tuple[Address, int]
"""An address as the file has it, and which of several equal ones it is: the file may have port 0 twice."""


class Listeners:
    """The listening sockets. `factory` makes the protocol of each accepted connection."""

    def __init__(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        *,
        siblings: int = 1,
        ports: Mapping[Key, Address] | None = None,
        purpose: str = LISTENING,
    ) -> None:
        """`siblings` processes listen on these addresses together, this one included; `ports` are those that
        they have settled on in place of port 0. `purpose` is what the log says of it."""
        self._factory = factory
        self._siblings = siblings
        self._ports = ports or {}
        self._purpose = purpose
        self._servers: dict[Key, asyncio.Server] = {}
        self._is_over = False

    async def open(self, addresses: Iterable[Address]) -> None:
        """Listens on those of `addresses` that are not open yet: on all of them or, if one cannot be had, on
        none. Raises UnavailableError, which names it, or says that everything has been closed for good.
        """
        opened: dict[Key, asyncio.Server] = {}
        try:
            for key in keys(addresses):
                if key not in self._servers:
                    address = self._ports.get(key, key[0])
                    purpose = self._purpose if self._purpose != LISTENING else "listen"
                    opened[key] = await listen(address, self._factory, purpose=purpose, shared=True)
            if self._is_over:
                raise UnavailableError(f"{self._purpose}: the gateway stops")
        except HboneError:
            for server in opened.values():
                server.close()
            raise
        self._servers |= opened
        for server in opened.values():
            bound = bound_address(server)
            log.info("%s on %s", self._purpose, bound, extra={"address": str(bound)})
            if listening_on(bound) > self._siblings:
                log.info("another process listens on %s too: both take connections until one ends", bound)

    async def keep_only(self, addresses: Iterable[Address]) -> None:
        """Closes what is open beside `addresses`, without losing a client."""
        wanted = set(keys(addresses))
        await self._close([key for key in self._servers if key not in wanted])

    async def close(self) -> None:
        """Closes everything for good, without losing a client."""
        self._is_over = True
        await self._close(list(self._servers))

    def abort(self) -> None:
        """Closes everything for good, now."""
        self._is_over = True
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    @property
    def bound(self) -> list[Address]:
        """Where it listens, one address for each given."""
        return [bound_address(server) for server in self._servers.values()]

    def have_company(self) -> bool:
        """Whether another process listens on each address, too: a successor, for new connections."""
        servers = self._servers.values()
        return bool(servers) and all(
            listening_on(bound_address(server)) > self._siblings for server in servers
        )

    async def _close(self, chosen: Iterable[Key]) -> None:
        servers = [self._servers.pop(key) for key in chosen]
        await close_listening(servers, self._factory, siblings=self._siblings)


def keys(addresses: Iterable[Address]) -> list[Key]:
    """The addresses, each with its number among equal ones."""
    seen: Counter[Address] = Counter()
    found: list[Key] = []
    for address in addresses:
        found.append((address, seen[address]))
        seen[address] += 1
    return found

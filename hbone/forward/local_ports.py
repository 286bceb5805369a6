"""-L: ports and unix sockets of this machine, each leading one way."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hbone.forward import unix_sockets
from hbone.forward.connections import Connections, Way
from hbone.forward.flags import Place
from shared.address import Address
from shared.listen import bound_address, listen
from shared.net.legs.accepted import AcceptedLeg


class LocalPort:
    """A place to listen on; `open` comes first."""

    def __init__(self, place: Place, connections: Connections) -> None:
        self.place = place
        """With the port that it got, once it is open."""
        self.connections = connections
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listens. Raises UnavailableError."""
        if isinstance(self.place, Path):
            self._server = await unix_sockets.listen(self.place, self._accept)
        else:
            self._server = await listen(self.place, self._accept, purpose="forward")
            bound = bound_address(self._server)
            self.place = Address(self.place.host, bound.port)

    def close(self) -> None:
        """Accepts no further connection."""
        server, self._server = self._server, None
        if server is not None and isinstance(self.place, Path):
            unix_sockets.remove(self.place, server)
        elif server is not None:
            server.close()

    def accepted(self, leg: AcceptedLeg) -> None:
        """A connection has come."""
        raise NotImplementedError

    def _accept(self) -> asyncio.BaseProtocol:
        return self.connections.accept(self.accepted)


class TargetPort(LocalPort):
    """Every connection to it goes one way."""

    def __init__(self, place: Place, connections: Connections, way: Way) -> None:
        super().__init__(place, connections)
        self.way = way

    def __str__(self) -> str:
        return f"{self.place} -> {self.way}"

    def accepted(self, leg: AcceptedLeg) -> None:
        self.connections.begin(leg).carry(self.way)

"""A new connection on which no HTTP/2 is spoken yet.

`hbone URL` dials before it imports what speaks HTTP/2, a quarter of the time to its first byte: the network
is on its way meanwhile.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, TypeVar, cast

from shared.net.legs.read_buffer import READ_BUFFER, READ_BYTES

if TYPE_CHECKING:
    from shared.net.http2.connection import Connection
    from shared.trust.revocations import Proof

C = TypeVar("C", bound="Connection")


class EarlyConnection(asyncio.BufferedProtocol):
    """Connected, and with TLS if there is any. It keeps what the server says first until `hand_over`."""

    proof: Proof = ()
    """As a `Connection` has it."""

    certificate_ends = math.inf
    """As a `Connection` has it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._early = b""
        self.lost = False
        """It is over."""

    def hand_over(self, connection: C) -> C:
        """Has `connection` speak from now on, and returns it."""
        transport = self._transport
        assert transport is not None, "nobody has it before it is connected"
        connection.proof, connection.certificate_ends = self.proof, self.certificate_ends
        transport.set_protocol(connection)
        connection.connection_made(transport)
        connection.feed(self._early)
        if len(self._early) >= READ_BYTES:
            transport.resume_reading()
        return connection

    def abort(self, cause: str) -> None:
        """Drops it at once; nobody is left who would want to know the cause."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.BufferedProtocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass of it

    def get_buffer(self, sizehint: int) -> memoryview:
        return READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self._early += bytes(READ_BUFFER[:nbytes])
        if self._transport is not None and len(self._early) >= READ_BYTES:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True

"""An HTTP/2 connection as a leg: it runs on the bytes of a tunnel, whose other leg is a stream.

So a tunnel that one side asks for carries requests of the other side.
"""

from __future__ import annotations

from shared.net.http2.connection import Connection
from shared.net.legs.carried import CarriedLeg
from shared.net.legs.stream import Stream


class ConnectionLeg(CarriedLeg):
    """The leg of `connection`, which has no transport yet, in the tunnel of `stream`."""

    def __init__(self, connection: Connection, stream: Stream) -> None:
        super().__init__(connection, stream)
        self.connection = connection

    @property
    def buffered_bytes(self) -> int:
        return len(self._received) + self.connection.session.pending_bytes

    def cause(self) -> str:
        return self.connection.cause or super().cause()

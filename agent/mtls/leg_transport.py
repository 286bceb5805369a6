"""A leg as asyncio's transport: so an HTTP/2 connection runs on one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from shared.errors import HboneError
from shared.net.http2.connection import FAIR_S, Connection
from shared.net.legs.contract import Buffer, Leg
from shared.net.legs.tls import TlsServerLeg


class LegTransport(asyncio.Transport):
    """The transport of `protocol` on `leg`, as that one's `RelayEnd`."""

    __slots__ = ("_closing", "_early", "_leg", "_paused", "_protocol", "_yields")

    def __init__(self, leg: TlsServerLeg, protocol: Connection) -> None:
        super().__init__()
        self._leg = leg
        self._protocol: Connection | None = protocol
        self._early: bytearray | None = None  # what has come before the protocol knows of us
        self._closing = False
        self._paused = False  # by the protocol
        self._yields = False  # what has come waits for the next turn of the event loop

    def join(self) -> None:
        """Joins the leg, whose handshake is complete. Only then it sends, and at once it pushes."""
        self._early = bytearray()
        self._leg.join(self)
        early, self._early = bytes(self._early), None
        if self._protocol is not None:
            self.begin(early)

    def begin(self, early: bytes) -> None:
        """To be called once the leg pushes to us; `early` is what it has pushed before."""
        assert self._protocol is not None
        self._protocol.connection_made(self)
        self._protocol.feed(early)

    def lost(self, error: HboneError | None) -> None:
        """The leg is gone. May be called more than once."""
        self._closing = True
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(error)

    # RelayEnd.

    def received(self, leg: Leg, data: Buffer) -> None:
        protocol = self._protocol
        if self._early is not None:
            self._early += data
            return
        if protocol is None:
            return
        started = time.monotonic()  # the connection measures full reads only, which a TLS record is not
        protocol.feed(data)
        if time.monotonic() - started > FAIR_S and not (self._yields or self._closing):
            self._yields = True
            self._leg.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._yields = False
        if not (self._paused or self._closing):
            self._leg.resume_reading()

    def ended(self, leg: Leg) -> None:
        self.close()  # an HTTP/2 connection has no use for one direction

    def failed(self, leg: Leg, error: HboneError) -> None:
        self.lost(error)

    def full(self, leg: Leg) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def drained(self, leg: Leg) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    # asyncio.Transport.

    def write(self, data: Buffer) -> None:
        self._leg.write(data)

    def get_write_buffer_size(self) -> int:
        return self._leg.buffered_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._leg.set_write_buffer_limits(high)

    def pause_reading(self) -> None:
        self._paused = True
        self._leg.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        if not self._yields:
            self._leg.resume_reading()

    def is_closing(self) -> bool:
        return self._closing

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._leg.close()

    def abort(self) -> None:
        self._closing = True
        self._leg.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sslcontext":
            return True  # there is TLS below: nobody should read the socket himself
        return self._leg.get_extra_info(name, default)

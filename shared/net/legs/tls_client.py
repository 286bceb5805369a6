"""The client's end of the mesh's mTLS, as a leg: `tls` with the roles of the handshake turned."""

from __future__ import annotations

import asyncio

from OpenSSL import SSL

from shared.net.legs.contract import Buffer
from shared.net.legs.tls import HANDSHAKE_TIMEOUT_S, Owner, TlsServerLeg, _State
from shared.net.legs.tls_handshake import ClientHandshake


class TlsClientLeg(TlsServerLeg):
    """A protocol for a plain TCP transport to a server of the mesh; `context` is one of `client_context`.

    With TLS 1.3 `established` comes before the server has judged our certificate: if it refuses that, the leg
    breaks after `join`.
    """

    __slots__ = ("_early_end", "_early_writes", "_hello")

    def __init__(
        self,
        context: SSL.Context,
        owner: Owner,
        server_name: str,
        *,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        """`server_name` is sent as SNI; empty: none."""
        super().__init__(context, owner, handshake_timeout_s=handshake_timeout_s)
        handshake = ClientHandshake(context, server_name)
        self._handshake = handshake
        self._tls = handshake.tls
        self._hello = handshake.begin()
        self._early_writes = bytearray()
        self._early_end = False

    def take_hello(self) -> bytes:
        """The ClientHello, for whoever sends it before there is a transport; the leg then sends none."""
        hello, self._hello = self._hello, b""
        return hello

    # As an upstream it is written to before it is joined: a relay joins its downstream first.

    def _send_early(self) -> None:
        # Before anything is read: a far side that has ended at once may make it the end of the tunnel.
        early, self._early_writes = self._early_writes, bytearray()
        self.write(early)
        if self._early_end:
            self.write_eof()

    def write(self, data: Buffer) -> None:
        if self._state is _State.HELD:
            self._early_writes += data
        else:
            super().write(data)

    def write_eof(self) -> None:
        if self._state is _State.HELD:
            self._early_end = True
        else:
            super().write_eof()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._hello:
            self._transport.write(self.take_hello())

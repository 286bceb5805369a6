"""The first phase of a connection: its ClientHello is peeked at, and kept for the far side.

Owned here: reading until the hello is whole, the deadline for that, the leg that the connection becomes then,
and turning a connection away with a TLS alert. What the name in the hello leads to is `tunnel.py`'s. No task
runs for a connection before its hello is whole: thousands of silent ones cost a timer each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from shared.errors import ALERT_UNRECOGNIZED_NAME, DOWNSTREAM_RESET, ClientHelloError, HboneError
from shared.net.read_buffer import READ_BUFFER
from shared.net.tcp import TcpLeg, peer_of
from shared.wire import alerts, client_hello
from shared.wire.client_hello import ClientHello

ALERT_LINGER_S = 1.0
"""How long a refused client may take to read its alert. Closing at once with bytes of it unread would make
the kernel send RST, which destroys the alert on its way (RFC 9112 section 9.6 has the same for HTTP)."""


class HelloTimeoutError(ClientHelloError):
    """The hello was not whole in time."""

    flag = "HELLO_TIMEOUT"
    alert = None


class EmptyConnectionError(ClientHelloError):
    """The peer closed without a byte: a load balancer's health check, not worth a line in the log."""

    flag = "EMPTY"
    alert = None


class NoNameError(ClientHelloError):
    """The hello carries no server name, so there is nothing to route by."""

    flag = "NO_SNI"
    alert = ALERT_UNRECOGNIZED_NAME


class ClientGoneError(HboneError):
    """The client broke off while its tunnel was being opened."""

    flag = DOWNSTREAM_RESET
    alert = None

    def __init__(self) -> None:
        super().__init__("the client broke off before its tunnel stood")


class ClientLeg(TcpLeg):
    """A client's connection as a leg that tells when it is gone: its last bytes may leave after its tunnel is
    over."""

    __slots__ = ("_on_lost", "lost")

    def __init__(self) -> None:
        super().__init__()
        self.lost = False
        self._on_lost: Callable[[], None] | None = None

    def when_lost(self, call: Callable[[], None] | None) -> None:
        """Calls `call`, and nobody who was to be called before, once the connection is gone; now if it is.
        None: nobody."""
        if self.lost and call is not None:
            call()
        else:
            self._on_lost = call

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        super().connection_lost(exc)
        call, self._on_lost = self._on_lost, None
        if call is not None:
            call()


class HelloPeek(asyncio.BufferedProtocol):
    """Reads the hello of one accepted connection.

    Calls `taken(leg, hello, started)`, or `refused(peer, started, error)` after the client has been told.
    `started` is the loop's time of the accept in seconds. It is in the set `peeking` until then.
    """

    _transport: asyncio.Transport
    _timer: asyncio.TimerHandle

    def __init__(
        self,
        timeout_s: float,
        peeking: set[HelloPeek],
        taken: Callable[[ClientLeg, ClientHello, float], None],
        refused: Callable[[str, float, HboneError], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._peeking = peeking
        peeking.add(self)
        self._taken = taken
        self._refused = refused
        self._data = bytearray()  # bounded: the parser decides within client_hello.MAX_PEEK_BYTES
        self._over = False
        self._started = 0.0

    @property
    def buffered_bytes(self) -> int:
        """What has come of the hello."""
        return len(self._data)

    def stop(self, error: HboneError) -> None:
        """Refuses the connection, whatever has come of its hello."""
        self._refuse(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        loop = asyncio.get_running_loop()
        self._started = loop.time()
        self._timer = loop.call_later(self._timeout_s, self._overdue)

    def get_buffer(self, sizehint: int) -> memoryview:
        return READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self._data += READ_BUFFER[:nbytes]
        try:
            hello = client_hello.parse(self._data)
            if hello is None:
                return
            if hello.server_name is None:
                raise NoNameError("the ClientHello has no server name (SNI)")
        except ClientHelloError as error:
            self._refuse(error)
            return
        self._decided()
        leg = cast("ClientLeg", ClientLeg.over(self._transport, self._data))
        self._taken(leg, hello, self._started)

    def eof_received(self) -> bool:
        self._cut_off()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._cut_off()

    def _overdue(self) -> None:
        size = len(self._data)
        self._refuse(
            HelloTimeoutError(f"no whole ClientHello within {self._timeout_s:g} s, got {size} bytes")
        )

    def _cut_off(self) -> None:
        if not self._data:
            self._refuse(EmptyConnectionError("closed without a byte"))
        else:
            self._refuse(ClientHelloError(f"closed after {len(self._data)} bytes of a ClientHello"))

    def _refuse(self, error: HboneError) -> None:
        if self._over:
            return
        self._decided()
        peer = peer_of(self._transport)
        turn_away(self._transport, error.alert)
        self._refused(peer, self._started, error)

    def _decided(self) -> None:
        self._over = True
        self._timer.cancel()
        self._peeking.discard(self)


def turn_away(transport: asyncio.Transport, alert: int | None) -> None:
    """Ends a connection whose client has not yet had a byte of TLS, with a fatal alert if there is one."""
    if transport.is_closing():
        return
    if alert is None:
        transport.close()
        return
    transport.write(alerts.fatal(alert))
    transport.write_eof()
    transport.set_protocol(_Discard(transport))
    transport.resume_reading()  # a leg pauses a client that sends much before the tunnel stands


class _Discard(asyncio.BufferedProtocol):
    """Reads what a refused client still sends, until it ends or `ALERT_LINGER_S` is over."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._timer = asyncio.get_running_loop().call_later(ALERT_LINGER_S, transport.abort)

    def get_buffer(self, sizehint: int) -> memoryview:
        return READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        pass

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()

"""The first phase of a connection: its ClientHello is peeked at, and kept for the far side.

The leg that the connection becomes, and the TLS alert that refuses it, are here, too. No task runs for a
connection before its hello is whole: thousands of silent ones cost a timer each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.config.limit_settings import Limits
from shared.errors import (
    ClientHelloError,
    EmptyConnectionError,
    HboneError,
    HelloTimeoutError,
    LimitError,
    NoNameError,
)
from shared.net.legs.read_buffer import READ_BUFFER
from shared.net.legs.tcp import TcpLeg
from shared.tls import alerts, client_hello
from shared.tls.client_hello import ClientHello

ALERT_LINGER_S = 1.0
"""How long a refused client may take to read its alert. Closing at once with bytes of it unread would make
the kernel send RST, which destroys the alert on its way (RFC 9112 section 9.6 has the same for HTTP)."""


class ClientLeg(TcpLeg):
    """A client's connection as a leg, from the accept on. Until its hello is whole a peek decides about it.
    Later it tells when it is gone: its last bytes may leave after its tunnel is over."""

    __slots__ = ("_on_lost", "_peek", "lost")

    def __init__(self, hellos: Hellos) -> None:
        super().__init__()
        self.lost = False
        self._on_lost: Callable[[], None] | None = None
        self._peek: HelloPeek | None = HelloPeek(self, hellos)

    def when_lost(self, call: Callable[[], None] | None) -> None:
        """Calls `call` once the connection is gone, or now if it is, instead of what was to be called before.
        None: nothing is called."""
        if self.lost and call is not None:
            call()
        else:
            self._on_lost = call

    def decided(self) -> None:
        """Its hello is whole, or it is turned away."""
        self._peek = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._peek is not None:
            self._peek.begin()

    def early_came(self, early: bytearray) -> None:
        if self._peek is not None:
            self._peek.look(early)
        else:
            super().early_came(early)

    def eof_received(self) -> bool:
        if self._peek is not None:
            self._peek.cut_off()
            return False
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._peek is not None:
            self._peek.cut_off()
        self.lost = True
        super().connection_lost(exc)
        call, self._on_lost = self._on_lost, None
        if call is not None:
            call()


class Hellos:
    """What the connections of all listeners have in common until their hello is whole.

    `admit(peer)` raises LimitError where a connection is not to be let in; it is reset. Then either
    `taken(leg, peer, hello, started)` is called, or `refused(peer, started, error)` after the client has been
    told. `started` is the loop's time of the accept in seconds, `peer` the client as host:port.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        admit: Callable[[str], None] = lambda peer: None,
        turned_away: Callable[[str, LimitError], None] = lambda peer, error: None,
        taken: Callable[[ClientLeg, str, ClientHello, float], None],
        refused: Callable[[str, float, HboneError], None],
    ) -> None:
        self.use_limits(limits)
        self.peeking: set[HelloPeek] = set()
        """Those that are admitted, and whose hello is not whole."""
        self.admit = admit
        self.turned_away = turned_away
        self.taken = taken
        self.refused = refused
        self.loop = asyncio.get_running_loop()

    def use_limits(self, limits: Limits) -> None:
        """Goes by `limits` for connections to come."""
        self.timeout_s = limits.hello_timeout_s

    def accepted(self) -> ClientLeg:
        """The protocol of an accepted connection."""
        return ClientLeg(self)


class HelloPeek:
    """Looks at what comes on one accepted connection until that is a whole hello. It is no protocol of its
    own: to replace one costs a transport that reads two system calls."""

    __slots__ = ("_hellos", "_leg", "_peer", "_started", "_timer")

    _timer: asyncio.TimerHandle

    def __init__(self, leg: ClientLeg, hellos: Hellos) -> None:
        self._leg = leg
        self._hellos = hellos

    @property
    def buffered_bytes(self) -> int:
        """What has come of the hello; bounded, for the parser decides within client_hello.MAX_PEEK_BYTES."""
        return self._leg.buffered_bytes

    def begin(self) -> None:
        """The connection is there."""
        leg, hellos = self._leg, self._hellos
        peer = self._peer = leg.peer_name
        try:
            hellos.admit(peer)
        except LimitError as error:
            leg.decided()
            leg.abort()
            hellos.turned_away(peer, error)
            return
        hellos.peeking.add(self)
        self._started = hellos.loop.time()
        self._timer = hellos.loop.call_later(hellos.timeout_s, self._overdue, hellos.timeout_s)

    def look(self, data: bytearray) -> None:
        """`data` is all that has come."""
        try:
            hello = client_hello.parse(data)
            if hello is None:
                return
            if hello.server_name is None:
                raise NoNameError("the ClientHello has no server name (SNI)")
        except ClientHelloError as error:
            self.stop(error)
            return
        self._decided()
        self._hellos.taken(self._leg, self._peer, hello, self._started)

    def cut_off(self) -> None:
        """No more will come."""
        size = self._leg.early_bytes
        if not size:
            self.stop(EmptyConnectionError("closed without a byte"))
        else:
            self.stop(ClientHelloError(f"closed after {size} bytes of a ClientHello"))

    def stop(self, error: HboneError) -> None:
        """Refuses the connection, whatever has come of its hello; nothing if that is decided."""
        if self not in self._hellos.peeking:
            return
        self._decided()
        turn_away(self._leg.release(), error.alert)
        self._hellos.refused(self._peer, self._started, error)

    def _overdue(self, timeout_s: float) -> None:
        size = self._leg.early_bytes
        self.stop(HelloTimeoutError(f"no whole ClientHello within {timeout_s:g} s, got {size} bytes"))

    def _decided(self) -> None:
        self._leg.decided()
        self._timer.cancel()
        self._hellos.peeking.discard(self)


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
    transport.resume_reading()  # a leg pauses a client that sends much before the tunnel is open


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

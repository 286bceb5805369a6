"""TLS of the ssl module on a transport that is no socket: between a tunnel (`carried`) and the protocol that
speaks in it. The event loops do this for their own transports only.

The rules:

1. The protocol's `connection_made` comes once the handshake is complete; its transport knows `ssl_object`. It
   is told of nothing if the handshake fails.
2. close_notify is sent when the protocol closes (RFC 8446 section 6.1). The peer's ends the connection, and
   so does an end without one: HTTP/2 has ends of its own.
3. What OpenSSL says of a failed handshake, its alert, goes out before the connection ends.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Any, cast

from shared.net.legs.contract import Buffer
from shared.net.legs.read_buffer import READ_BUFFER
from shared.net.tls.mesh_tls import alert_of

CONTROL_LIMIT_BYTES = 64 << 10
"""What OpenSSL may answer by itself while the peer reads nothing: 2000 key updates, which nobody needs."""


class CarriedTls(asyncio.BufferedProtocol):
    """A protocol for a transport without TLS, on which `protocol` gets one with it."""

    def __init__(
        self,
        context: ssl.SSLContext,
        protocol: asyncio.BufferedProtocol,
        *,
        server_side: bool = False,
        server_name: str = "",
    ) -> None:
        """`server_name` is a client's SNI; empty: none is sent."""
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self.tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_name or None
        )
        self._protocol: asyncio.BufferedProtocol | None = protocol
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_open = False  # the protocol has its transport
        self._is_paused = False  # it wants no data
        self._is_pushing = False
        self._is_full = False  # the transport wants no data
        self._control_bytes = 0
        self._cause: Exception | None = None  # why it ends, if the peer is at fault

    async def handshake(self) -> None:
        """Returns once the handshake is complete. Cancelled, it breaks the connection off.

        Raises ssl.SSLError if TLS failed, or another OSError if the connection was lost before.
        """
        try:
            await asyncio.shield(self._done)
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self) -> None:
        """Breaks the connection off."""
        if self._transport is not None:
            self._transport.abort()
        else:
            self._fail(ConnectionAbortedError("broken off before it had begun"))

    # asyncio.BufferedProtocol, for the transport without TLS.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._done.done():
            self._transport.abort()
        else:
            self._shake()

    def get_buffer(self, sizehint: int) -> memoryview:
        return READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.write(READ_BUFFER[:nbytes])
        if self._is_open:
            self._push()
        elif not self._done.done():
            self._shake()

    def eof_received(self) -> bool:
        self._fail(ConnectionResetError("closed by the peer"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionResetError("closed by the peer"))
        protocol, self._protocol = self._protocol, None
        self._transport = None
        if self._is_open and protocol is not None:
            self._is_open = False
            protocol.connection_lost(self._cause or exc)

    def pause_writing(self) -> None:
        self._is_full = True
        if self._is_open and self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._is_full = False
        self._control_bytes = 0
        if self._is_open and self._protocol is not None:
            self._protocol.resume_writing()

    # The handshake.

    def _shake(self) -> None:
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            transport = self._transport
            if transport is not None:
                transport.write(alert_of(error) or self._outgoing.read())
                transport.close()
            self._fail(error)
            return
        self._flush()
        self._is_open = True
        protocol = self._protocol
        assert protocol is not None
        protocol.connection_made(_TlsTransport(self))
        if self._is_full:
            protocol.pause_writing()
        if not self._done.done():
            self._done.set_result(None)
        self._push()

    def _fail(self, error: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(error)
            self._done.exception()  # nobody may wait for it any more

    # Data.

    def _push(self) -> None:
        """Hands plaintext to the protocol, as much as fits into its buffer at a time, until there is none or
        it wants none."""
        if self._is_pushing:
            return
        self._is_pushing = True
        is_last = False
        read: Any = self.tls.read  # typeshed has bytes as what it returns, with a buffer also
        while self._is_open and not (self._is_paused or is_last):
            protocol = self._protocol
            assert protocol is not None
            buffer = cast("memoryview", protocol.get_buffer(-1))
            size = 0
            try:
                while size < len(buffer) and not is_last:
                    count: int = read(len(buffer) - size, buffer[size:])
                    size += count
                    if not count:  # close_notify
                        is_last = True
                        self._end()
            except ssl.SSLWantReadError:
                is_last = True
            except ssl.SSLError as error:  # an alert, or what is no TLS
                is_last = True
                self._cause = error
                self._end()
            if size and self._is_open:
                try:
                    protocol.buffer_updated(size)
                except Exception:  # a fault of ours: who calls us may be the event loop
                    self.abort()
                    raise
        self._is_pushing = False
        self._answer()

    def _answer(self) -> None:
        """Sends what OpenSSL wrote of its own accord while it read: key updates, alerts."""
        if self._outgoing.pending:
            if self._is_full:
                self._control_bytes += self._outgoing.pending
                if self._control_bytes > CONTROL_LIMIT_BYTES:
                    self.abort()
                    return
            self._flush()

    def _end(self) -> None:
        """The peer sends no more."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def _flush(self) -> None:
        if self._outgoing.pending and self._transport is not None:
            self._transport.write(self._outgoing.read())

    # What the protocol does with its transport.

    @property
    def under(self) -> asyncio.Transport | None:
        """The transport without TLS; None: it is gone."""
        return self._transport

    def send(self, data: Buffer) -> None:
        """Sends `data` to the peer."""
        if self._transport is None or not len(data):
            return
        view = memoryview(data)
        try:
            while view:
                sent = self.tls.write(view)
                view = view[sent:]
        except ssl.SSLError:  # the peer has broken TLS, and we have told it
            self.abort()
            return
        self._flush()

    def pause(self, is_paused: bool) -> None:
        """Whether the protocol wants no data for now."""
        self._is_paused = is_paused
        if self._transport is None:
            return
        if is_paused:
            self._transport.pause_reading()
        else:
            # Not at once: what is read goes through the buffer that whoever calls us may look at.
            asyncio.get_running_loop().call_soon(self._push)
            self._transport.resume_reading()

    def end(self) -> None:
        """Ends the connection, after all that was sent."""
        if self._transport is not None and not self._transport.is_closing():
            with suppress(ssl.SSLError):  # it wants to read the peer's, which need not come
                self.tls.unwrap()
            self._flush()
            self._transport.close()


class _TlsTransport(asyncio.Transport):
    """What the protocol sees of it."""

    def __init__(self, below: CarriedTls) -> None:
        super().__init__()
        self._below = below

    def write(self, data: Buffer) -> None:
        self._below.send(data)

    def get_write_buffer_size(self) -> int:
        under = self._below.under
        return 0 if under is None else under.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        under = self._below.under
        if under is not None:
            under.set_write_buffer_limits(high, low)

    def pause_reading(self) -> None:
        self._below.pause(True)

    def resume_reading(self) -> None:
        self._below.pause(False)

    def is_closing(self) -> bool:
        under = self._below.under
        return under is None or under.is_closing()

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self._below.end()

    def abort(self) -> None:
        self._below.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._below.tls
        if name == "sslcontext":
            return self._below.tls.context
        under = self._below.under
        return default if under is None else under.get_extra_info(name, default)

"""The TCP leg: a plain connection as one end of a tunnel (rules in `contract`)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import cast

from shared.errors import StreamResetError
from shared.http2.frames import CANCEL
from shared.net.legs.contract import Buffer, RelayEnd
from shared.net.legs.read_buffer import (
    BULK_READ_BUFFER,
    BULK_READ_BYTES,
    READ_BUFFER,
    READ_BYTES,
)
from shared.net.legs.small_writes import (
    MARK_BYTES,
    SMALL_BYTES,
    UNSENT_BYTES,
    SmallWrites,
    TransportLeg,
)
from shared.net.legs.tcp_end import (
    RESET_ON_CLOSE,
    LastBytes,
    close_if_taken,
    read_after_reset,
    reset,
    set_end,
    unread,
    unsent_bytes,
)

EARLY_BYTES = READ_BYTES
"""What is kept of a peer that talks before the tunnel stands; reading pauses beyond it."""

CLOSE_TIMEOUT_S = 30.0
"""How long the last bytes of a closing HTTP/2 connection wait for a peer that takes none of them: it has no
reason not to read, whatever its streams do."""

BULK_READS = 8
"""Full large reads after which the others get their turn: 2 MiB, as much as 32 small ones, after which the
event loop gives way by itself."""


class TcpLeg(TransportLeg):
    """A TCP connection, ours or accepted, as a leg."""

    __slots__ = (
        "_bulk_reads",
        "_early",
        "_ended",
        "_error",
        "_gone",
        "_paused",
        "_sock",
    )

    def __init__(self, sock: socket.socket | None = None) -> None:
        """`sock` is what the transport is made of, if that is a socket of ours (`tcp_end.set_end`)."""
        super().__init__()
        self._sock = sock
        self._early: bytearray | None = None  # received before join
        self._ended = False  # FIN came
        self._error: StreamResetError | None = None  # how it broke before join
        self._gone = False
        self._paused = False  # by the relay
        self._bulk_reads = 0  # the last ones, full and large, and one more; 0: the next read is a small one

    def release(self) -> asyncio.Transport:
        """Gives the transport away, to be ended by somebody else; the leg is gone."""
        self._gone = True
        return self._transport

    def detach(self) -> tuple[socket.socket, bytearray]:
        """Takes the connection out of the event loop: a bare, non-blocking socket, the caller's to close, and
        what has been received so far. Only before the leg is joined; it is gone then.

        Raises:
            StreamResetError: the connection has broken.
            OSError: no file descriptor is left; the leg stays as it was.
        """
        # A transport that has met the error has used it up: the socket would only tell of an end.
        if self._gone or self._transport.is_closing():
            raise self._error or StreamResetError("connection reset: closed by the peer", CANCEL)
        sock = socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
        sock.setblocking(False)
        self._gone = True
        self._transport.abort()  # closes its own descriptor, of which the peer hears nothing
        early, self._early = self._early, None
        return sock, early or bytearray()

    @property
    def peer_name(self) -> str:
        """The peer's address as host:port, for logs."""
        return peer_of(self._transport)

    def leave(self, early: bytes = b"") -> None:
        """Undoes `join`, for another relay: what comes is kept again, behind `early`, which has come
        already."""
        self._relay = None
        self._bulk_reads = 0
        if early:
            self._early = bytearray(early)

    @property
    def early_bytes(self) -> int:
        """How much has come before it was joined."""
        return len(self._early or b"")

    def first(self, size: int) -> bytes:
        """The first `size` bytes of what has come before it was joined."""
        return bytes((self._early or b"")[:size])

    def drop_first(self, size: int) -> None:
        """They have been passed on: the relay to come does not get them."""
        if self._early is not None:
            del self._early[:size]

    def early_came(self, early: bytearray) -> None:
        """Something has come before it was joined, and is the last of `early`."""
        if len(early) >= EARLY_BYTES:
            self.pause_reading()

    def unread(self) -> bytes:
        """While `failed` is told: what the peer had sent before it broke off. A tunnel has no use for it, for
        there nothing says whether it is the whole."""
        return unread(self._transport)

    @property
    def unsent_bytes(self) -> int:
        """What the peer has not taken, here and in the kernel; costs a system call."""
        return 0 if self._gone else unsent_bytes(self._transport)

    def keep_little(self, most_bytes: int) -> None:
        """Has the kernel keep no more than `most_bytes` of ours for the peer, or twice as many (socket(7));
        else it lets them grow to 4 MiB (tcp_wmem in tcp(7))."""
        sock = self._sock or self._transport.get_extra_info("socket")
        if sock is not None and not self._transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, most_bytes)

    # Leg.

    @property
    def buffered_bytes(self) -> int:
        return self.early_bytes + self._unsent_bytes

    def join(self, relay: RelayEnd) -> None:
        self._relay = relay
        if not self._gone:
            set_end(self._transport, RESET_ON_CLOSE, self._sock)
        early, self._early = self._early, None
        if self._paused:
            self.resume_reading()
        if early:
            relay.received(self, early)
        if self._full:
            relay.full(self)
        if self._ended:
            relay.ended(self)
        if self._error is not None:
            relay.failed(self, self._error)

    def write(self, data: Buffer) -> None:
        if self._gone:
            return
        if self._small is not None:
            self._small.add(data)
            if not self._full and self._unsent_bytes > MARK_BYTES:
                self._become_full()
        elif len(data) < SMALL_BYTES and self._transport.get_write_buffer_size() > UNSENT_BYTES:
            self._small = SmallWrites(self._transport, data)
            self._small.begin()
        else:
            self._transport.write(data if type(data) is bytes else bytes(data))

    # A transport that broke closes before it says so in connection_lost; uvloop's then raise here.

    def write_eof(self) -> None:
        if not self._gone and not self._transport.is_closing():
            self._send_small()
            self._transport.write_eof()

    def pause_reading(self) -> None:
        self._paused = True
        if not self._gone and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        if not self._gone and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        if self._gone:
            return
        self._gone = True
        self._relay = None  # which names us, and is over
        transport = self._transport
        if self._small is not None and not transport.is_closing():
            self._send_small()
        if self._ended and not transport.is_closing() and close_if_taken(transport, self._sock):
            return  # as most are
        self._closing = LastBytes(transport, peer_ended=self._ended)

    def abort(self) -> None:
        if self._gone and (self._closing is None or self._transport.is_closing()):
            return
        self._gone = True
        self._relay = None
        self._small = None
        reset(self._transport)

    # asyncio.BufferedProtocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass of it

    def get_buffer(self, sizehint: int) -> memoryview:
        return BULK_READ_BUFFER if self._bulk_reads else READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        relay = self._relay
        if relay is not None:
            relay.received(self, BULK_READ_BUFFER[:nbytes])
            if nbytes >= READ_BYTES:
                self._plan_reads(nbytes)
            elif self._bulk_reads:
                self._bulk_reads = 0
            return
        if self._closing is not None:
            return
        self.early_came(self._keep_early(READ_BUFFER[:nbytes]))

    def _keep_early(self, data: Buffer) -> bytearray:
        early = self._early
        if early is None:
            early = self._early = bytearray(data)
        else:
            early += data
        return early

    def _plan_reads(self, nbytes: int) -> None:
        """After a full read: the next is a large one, if the far side keeps up; else we would hold it."""
        if self._paused or self._gone or self._relay is None:
            self._bulk_reads = 0
        elif nbytes < BULK_READ_BYTES:
            self._bulk_reads = 1
        elif self._bulk_reads <= BULK_READS:
            self._bulk_reads += 1
        else:
            self._bulk_reads = 1
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self._paused:
            self.resume_reading()

    def eof_received(self) -> bool:
        self._ended = True
        if self._closing is not None:
            self._closing.peer_has_ended()
        elif self._relay is not None:
            self._relay.ended(self)
        return True  # keep the sending side open: FIN ends one direction only

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closing is not None:
            self._closing.cancel()
        self._small = None
        if self._gone:
            return
        rest = None if self._ended else read_after_reset(self._transport, exc)
        if rest is not None:
            self._ended = True
            relay = self._relay
            if relay is None:
                self._keep_early(rest)
            else:
                relay.received(self, rest)  # upon which it may close us
                relay.ended(self)
        self._gone = True
        self._error = StreamResetError(f"connection reset: {exc or 'closed by the peer'}", CANCEL)
        if self._relay is not None:
            self._relay.failed(self, self._error)
            self._relay = None


class CloseWatch:
    """Ends a closing connection with RST once its peer has taken nothing for `CLOSE_TIMEOUT_S`: FIN would
    make what it got look like the whole. To be cancelled when the connection is gone."""

    __slots__ = ("_timer", "_transport", "_unsent")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._wait()

    def cancel(self) -> None:
        """Stops watching."""
        self._timer.cancel()

    def _wait(self) -> None:
        self._unsent = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._look)

    def _look(self) -> None:
        if self._transport.get_write_buffer_size() < self._unsent:
            self._wait()
        else:
            reset(self._transport)


class Surplus(asyncio.Protocol):
    """A connection beyond a limit: reset unread, so that it costs next to nothing. `turned_away` is
    told its address, as host:port."""

    def __init__(self, turned_away: Callable[[str], None]) -> None:
        self._turned_away = turned_away

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = peer_of(transport)
        reset(cast("asyncio.Transport", transport))
        self._turned_away(peer)


def peer_of(transport: asyncio.BaseTransport) -> str:
    """The address of the other end, as host:port."""
    return address_text(transport.get_extra_info("peername"))


def address_text(name: object) -> str:
    """host:port of a socket name as the socket module gives it; IPv6 hosts in brackets."""
    if isinstance(name, tuple) and len(name) >= 2:
        host, port = name[0], name[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return str(name) if name else "unknown"

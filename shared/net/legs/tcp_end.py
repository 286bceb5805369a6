"""How a TCP connection ends, for legs on one, plain and TLS.

The kernel's own ways lose bytes, or make a part look like the whole:

1. It ends a process's connections with FIN, whatever was still to be sent. A leg in a tunnel is set to end
   them with RST instead (SO_LINGER), from `join` until the kernel has all, and FIN.
2. It answers a close over unread bytes with RST, which destroys what is on its way (RFC 9112 section 9.6).
   `LastBytes` sends FIN, and reads and drops what still comes.
3. It fails a write once the peer has sent RST, and the event loop then closes the socket. What the peer sent
   up to its FIN, before the RST, is still there to be read: `read_after_reset`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import sys
import termios
from collections.abc import Callable

from shared.net.legs.read_buffer import READ_BYTES

LAST_BYTES_TIMEOUT_S = 3600.0
"""How long a tunnel's last bytes wait for a peer that takes none of them. Their reader may well be slow, or
paused by a person. Room shows in steps of up to a stream's window: 64 MiB at most, for which a reader of 18
KiB/s needs an hour, 1 MiB for one that has been slow for long. A peer that is dead is found out by TCP in 15
minutes; Envoy waits an hour, too."""

LINGER_S = 5.0
"""How long a peer that has taken everything, and goes on sending, may take to its own end."""

FIRST_LOOK_S = 0.05
"""When last bytes are checked first, if nothing closes the connection before. Then the time doubles: up to
`READING_LOOK_S` while the peer takes some, else up to `LONGEST_LOOK_S`."""

READING_LOOK_S = 1.0
LONGEST_LOOK_S = 30.0

KERNEL_BYTES = 64 << 10
"""What is left to the kernel alone: without a process it gives up on a reader that pauses for some minutes
(tcp_orphan_retries), so more than the last read is watched."""

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER on, 0 s: close() sends RST (socket(7)), which the peer cannot mistake for an orderly end."""

TCP_CLOSE = 7
"""First byte of TCP_INFO of a connection that is over (tcp(7), linux/tcp_states.h)."""

_TCP_INFO = getattr(socket, "TCP_INFO", None)  # macOS has none

_BYTES_ACKED_AT, _BYTES_ACKED_END = 120, 128
"""tcpi_bytes_acked in TCP_INFO (linux/tcp.h)."""

FIN_ON_CLOSE = struct.pack("ii", 0, 0)
"""SO_LINGER off, the default."""

UNREAD = "unread"
"""What a transport without a socket is asked for by `get_extra_info`: a function that gives what has come and
nobody has read."""


class LastBytes:
    """Closes a connection once its peer has taken all that was written to it.

    The owner drops what still comes, and calls `flushed` for resume_writing, `peer_has_ended` for
    eof_received (which has to keep the transport open) and `cancel` for connection_lost. The end:

    - the peer has ended, too, and the kernel has what is left, `KERNEL_BYTES` at most: closed;
    - it has taken everything and goes on sending or waiting: closed after `LINGER_S`;
    - it has taken nothing for `LAST_BYTES_TIMEOUT_S`, or is gone: reset, for FIN would make a part look like
      the whole.
    """

    __slots__ = ("_idle_s", "_next_s", "_peer_ended", "_timer", "_transport", "_unsent")

    def __init__(self, transport: asyncio.Transport, *, peer_ended: bool, fin: bool = True) -> None:
        """`peer_ended`: nothing can come any more. Without `fin` it is sent only when all is over."""
        self._transport = transport
        self._peer_ended = peer_ended
        self._timer: asyncio.TimerHandle | None = None
        self._idle_s = 0.0  # for how long the peer has taken nothing
        self._next_s = FIRST_LOOK_S
        self._unsent = sys.maxsize
        if transport.is_closing():
            return  # it broke, and connection_lost is on its way
        if peer_ended and close_if_taken(transport):
            return
        if fin:
            transport.write_eof()
        if not peer_ended:
            transport.resume_reading()
        _leaving.add(self)
        self._wait()
        if transport.get_write_buffer_size():
            transport.set_write_buffer_limits(high=0)  # `flushed` comes when nothing is left
        else:
            set_end(transport, FIN_ON_CLOSE)

    @property
    def is_over(self) -> bool:
        """The connection is closed."""
        return self._transport.is_closing()

    def flushed(self) -> None:
        """The kernel has everything."""
        # Not from within the transport's own call: it has yet to send FIN.
        asyncio.get_running_loop().call_soon(self._has_left)

    def _has_left(self) -> None:
        if not self._transport.is_closing():
            set_end(self._transport, FIN_ON_CLOSE)  # should the process end now: the kernel has all, and FIN
            self._close_if_taken()

    def peer_has_ended(self) -> None:
        """FIN came."""
        self._peer_ended = True
        self._close_if_taken()

    def cancel(self) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
        self._taken()

    def _taken(self) -> None:
        _leaving.discard(self)
        if not _leaving:
            while _waiting:
                _waiting.pop().set()

    def _close_if_taken(self) -> None:
        if self._peer_ended and not self._transport.is_closing() and close_if_taken(self._transport):
            self.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._next_s, self._look)

    def _look(self) -> None:
        if self._transport.is_closing():
            self._taken()  # or lost: it broke
            return
        unsent = unsent_bytes(self._transport)
        if unsent < self._unsent:
            self._idle_s, self._next_s = 0.0, min(2 * self._next_s, READING_LOOK_S)
        else:
            self._idle_s, self._next_s = self._idle_s + self._next_s, min(2 * self._next_s, LONGEST_LOOK_S)
        self._unsent = unsent
        self._close_if_taken()
        if self._transport.is_closing():
            return
        if _is_dead(self._transport) or (unsent and self._idle_s >= LAST_BYTES_TIMEOUT_S):
            reset(self._transport)
        elif not unsent and self._idle_s >= LINGER_S:
            self._close()
        else:
            if not unsent:
                self._taken()
            self._wait()

    def _close(self) -> None:
        self.cancel()
        set_end(self._transport, FIN_ON_CLOSE)
        self._transport.close()


_leaving: set[LastBytes] = set()
"""Those whose peer has not taken everything."""

_waiting: list[asyncio.Event] = []
"""Set when there are none."""


def last_bytes_left() -> asyncio.Event:
    """An event that is set once every closed leg's peer has taken what was written to it, or cannot. For the
    end of a process: tunnels that are over may still have bytes on their way out."""
    for one in [one for one in _leaving if one.is_over]:  # of a loop that was closed
        _leaving.discard(one)
    event = asyncio.Event()
    if _leaving:
        _waiting.append(event)
    else:
        event.set()
    return event


def reset(transport: asyncio.Transport) -> None:
    """Ends a TCP connection with RST, dropping what has not been sent."""
    set_end(transport, RESET_ON_CLOSE)
    transport.abort()


def set_end(transport: asyncio.Transport, linger: bytes, sock: socket.socket | None = None) -> None:
    """What the kernel sends when an open transport's socket is closed: `RESET_ON_CLOSE`, `FIN_ON_CLOSE`.
    `sock` is the socket that the transport was made of, if it was: asking that one costs least."""
    lent = sock if sock is not None else _lent(transport)
    if lent is None:
        return
    try:
        lent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    except OSError:
        pass  # the peer has gone already, and there is nobody to tell
    finally:
        if lent is not sock:
            lent.detach()


def close_if_taken(transport: asyncio.Transport, sock: socket.socket | None = None) -> bool:
    """Closes an open connection whose peer has ended, if the kernel can be left alone with what the peer has
    not taken (`KERNEL_BYTES`); it sends FIN unless that was sent. Else nothing is done, and False returned.
    `sock` as in `set_end`."""
    if transport.get_write_buffer_size():
        return False
    lent = sock if sock is not None else _lent(transport)
    if lent is not None:
        try:
            # Both FINs taken, or a reset: nothing is left that the way of closing could make a difference to.
            if not _is_closed(lent):
                if queued_bytes(lent.fileno()) > KERNEL_BYTES:
                    return False
                lent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, FIN_ON_CLOSE)
        except OSError:
            pass  # likewise
        finally:
            if lent is not sock:
                lent.detach()
    transport.close()
    return True


def unsent_bytes(transport: asyncio.Transport) -> int:
    """What the peer of an open transport has not acknowledged, FIN included, here and in the kernel
    (SIOCOUTQ, tcp(7))."""
    unsent = transport.get_write_buffer_size()
    fd = _descriptor(transport)
    if fd >= 0:
        with contextlib.suppress(OSError):
            unsent += queued_bytes(fd)
    return unsent


def acknowledged_bytes(transport: asyncio.Transport) -> int | None:
    """How many bytes the peer's kernel has taken so far; None where that is not known (a closed transport, a
    kernel before Linux 4.1)."""
    fd = _descriptor(transport)
    if fd < 0 or _TCP_INFO is None:
        return None
    sock: socket.socket = transport.get_extra_info("socket")
    with contextlib.suppress(OSError):
        told = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_ACKED_END)
        if len(told) == _BYTES_ACKED_END:
            return int.from_bytes(told[_BYTES_ACKED_AT:_BYTES_ACKED_END], sys.byteorder)
    return None


def queued_bytes(fd: int) -> int:
    """What the kernel has of a socket's, and its peer has not acknowledged, FIN included. Raises OSError."""
    return int.from_bytes(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def read_after_reset(transport: asyncio.Transport, cause: Exception | None) -> bytes | None:
    """For connection_lost of plain TCP: what the peer sent up to its FIN and nobody has read; None if it
    broke off without FIN.

    Linux says EPIPE to a write for RST after FIN, ECONNRESET for RST without (tcp_reset in its tcp_input.c).
    """
    return unread(transport) if isinstance(cause, BrokenPipeError) else None


def unread(transport: asyncio.Transport) -> bytes:
    """For connection_lost, while the socket is still there: what it holds that nobody has read. The kernel's
    receive buffer bounds it, or the window of the stream that stands for the socket (UNREAD)."""
    take: Callable[[], bytes] | None = transport.get_extra_info(UNREAD)
    if take is not None:
        return take()
    fd = _descriptor(transport)
    words = bytearray()
    if fd >= 0:
        with contextlib.suppress(OSError):
            while data := os.read(fd, READ_BYTES):
                words += data
    return bytes(words)


def _is_dead(transport: asyncio.Transport) -> bool:
    """Whether the peer has sent RST. A transport that neither reads nor has anything to write is not told."""
    if _descriptor(transport) < 0:
        return False
    return _is_closed(transport.get_extra_info("socket"))


def _is_closed(sock: socket.SocketType) -> bool:
    """Whether the kernel is done with a TCP connection. A unix socket does not tell, nor does macOS."""
    if _TCP_INFO is None:
        return False
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0] == TCP_CLOSE
    except OSError:
        return False


def _descriptor(transport: asyncio.Transport) -> int:
    """Of an open transport, else -1."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    return -1 if sock is None else sock.fileno()


def _lent(transport: asyncio.Transport) -> socket.SocketType | None:
    """A socket with the descriptor of an open transport, to be detached after use. The one that uvloop gives
    makes a `socket.socket` for each option, at 2 µs more than this, which is its base class."""
    fd = _descriptor(transport)
    return None if fd < 0 else socket.SocketType(socket.AF_INET, socket.SOCK_STREAM, 0, fd)

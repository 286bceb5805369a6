"""A protocol as a leg: it runs on the bytes of a tunnel, whose other leg is a stream, as if on a socket.

What comes is given to the protocol in the next turn of the event loop: its buffer is the process's one read
buffer, in which what comes may be. The protocol is told in a later turn, too, that its connection is lost, as
the event loop does it. What has come before and was not read, it can still have (`tcp_end.unread`).
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from shared.errors import StreamResetError
from shared.http2.frames import CANCEL
from shared.net.legs.contract import Buffer, RelayEnd
from shared.net.legs.read_buffer import READ_BYTES
from shared.net.legs.stream import Stream
from shared.net.legs.tcp_end import UNREAD


class CarriedLeg:
    """The leg of `protocol`, which has no transport yet, in the tunnel of `stream`."""

    def __init__(self, protocol: asyncio.BufferedProtocol, stream: Stream) -> None:
        self._protocol = protocol
        self._stream = stream
        self._relay: RelayEnd | None = None
        self._received = bytearray()  # not given to the protocol yet; the stream's window bounds it
        self._is_made = False  # the protocol knows of its transport
        self._is_planned = False
        self._peer_ended = False
        self._is_paused = False  # the protocol wants no data
        self._is_full = False  # the relay knows that
        self._is_gone = False
        self._is_over = False  # the protocol has closed its transport
        self._has_ended = False  # it sends no more

    # Leg.

    @property
    def buffered_bytes(self) -> int:
        return len(self._received)

    def join(self, relay: RelayEnd) -> None:
        self._relay = relay
        self._make()

    def write(self, data: Buffer) -> None:
        if not self._is_gone:
            self._received += data
            self._plan()

    def write_eof(self) -> None:
        self._peer_ended = True
        self._plan()

    def pause_reading(self) -> None:
        if not self._is_gone:
            self._protocol.pause_writing()

    def resume_reading(self) -> None:
        if not self._is_gone:
            self._protocol.resume_writing()

    def close(self) -> None:
        self._lose(None)

    def abort(self) -> None:
        self._lose(ConnectionResetError("the tunnel that carried it is gone"))

    def _make(self) -> None:
        self._is_made = True
        self._protocol.connection_made(_Transport(self))

    # What comes.

    def _plan(self) -> None:
        if not (self._is_planned or self._is_paused or self._is_gone):
            self._is_planned = True
            asyncio.get_running_loop().call_soon(self._feed)

    def _feed(self) -> None:
        """One read, then the others get their turn."""
        self._is_planned = False
        if self._is_paused or self._is_gone:
            return
        piece = bytes(self._received[:READ_BYTES])
        del self._received[:READ_BYTES]
        if piece:
            try:
                self._give(piece)
            except Exception:  # a fault of ours costs the connection, as the event loop has it on a socket
                self.break_off()
                raise
        if self._received:
            self._plan()
        elif self._peer_ended and not (self._is_paused or self._is_gone or self._protocol.eof_received()):
            self.end()
        self._tell_relay()

    def _give(self, piece: bytes) -> None:
        view = memoryview(piece)
        while view and not self._is_gone:
            buffer = cast("memoryview", self._protocol.get_buffer(-1))
            size = min(len(view), len(buffer))
            buffer[:size] = view[:size]
            view = view[size:]
            self._protocol.buffer_updated(size)

    def _tell_relay(self) -> None:
        is_full = self._is_paused or len(self._received) > READ_BYTES
        if is_full is not self._is_full and self._relay is not None:
            self._is_full = is_full
            if is_full:
                self._relay.full(self)
            else:
                self._relay.drained(self)

    # What the protocol does with its transport.

    @property
    def peer_name(self) -> str:
        """The address of whoever is at the other end of the tunnel's own connection."""
        return self._stream.connection.peer_name

    @property
    def unsent_bytes(self) -> int:
        """What the tunnel's stream holds."""
        return self._stream.unsent_bytes

    @property
    def is_over(self) -> bool:
        """Nothing more can be sent."""
        return self._is_over or self._is_gone

    def send(self, data: Buffer) -> None:
        """Sends `data` to the far end of the tunnel."""
        if self._relay is not None and not (self.is_over or self._has_ended):
            self._relay.received(self, data)

    def send_end(self) -> None:
        """Nothing more is sent; what comes is still read."""
        if not (self.is_over or self._has_ended):
            self._has_ended = True
            if self._relay is not None:
                self._relay.ended(self)

    def pause(self, is_paused: bool) -> None:
        """Whether the protocol wants no data for now."""
        self._is_paused = is_paused
        self._tell_relay()
        if not is_paused:
            self._plan()

    def end(self) -> None:
        """The connection is over, after all that it has sent."""
        if not self.is_over:
            self.send_end()
            self._is_over = True
            asyncio.get_running_loop().call_soon(self._leave)

    def break_off(self) -> None:
        """The connection is over, at once."""
        if not self._is_gone:
            self._is_over = True
            asyncio.get_running_loop().call_soon(self._leave)  # the protocol has yet to say why

    def take_unread(self) -> bytes:
        """What has come and was not given to the protocol; for its `connection_lost`."""
        rest = bytes(self._received)
        self._received.clear()
        return rest

    def cause(self) -> str:
        """Why the protocol has closed its transport, for logs."""
        return "connection closed by us"

    def _leave(self) -> None:
        """It wants nothing more from the far end of the tunnel: all is complete if it has ended before, else
        the tunnel is broken."""
        relay = self._relay
        self._lose(None)
        if relay is not None:
            relay.failed(self, StreamResetError(self.cause(), CANCEL))

    def _lose(self, error: Exception | None) -> None:
        if not self._is_gone:
            self._is_gone = True
            self._relay = None
            # Not at once: what is read by then goes through the buffer that whoever calls us may look at.
            asyncio.get_running_loop().call_soon(self._tell_lost, error)

    def _tell_lost(self, error: Exception | None) -> None:
        if not self._is_made:
            self._make()  # a protocol is never told of an end before its beginning
        self._protocol.connection_lost(error)
        self._received.clear()


class _Transport(asyncio.Transport):
    """What the protocol sees of its leg."""

    def __init__(self, leg: CarriedLeg) -> None:
        super().__init__()
        self._leg = leg

    def write(self, data: Buffer) -> None:
        self._leg.send(data)

    def write_eof(self) -> None:
        self._leg.send_end()

    def get_write_buffer_size(self) -> int:
        return self._leg.unsent_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing: the stream is full as soon as it holds anything, and has room when it holds nothing."""

    def pause_reading(self) -> None:
        self._leg.pause(True)

    def resume_reading(self) -> None:
        self._leg.pause(False)

    def is_closing(self) -> bool:
        return self._leg.is_over

    def can_write_eof(self) -> bool:
        return False  # an HTTP/2 connection has no use for one direction, and closes

    def close(self) -> None:
        self._leg.end()

    def abort(self) -> None:
        self._leg.break_off()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "peername":
            return self._leg.peer_name
        if name == "sslcontext":
            return True  # nobody should read the socket himself
        if name == UNREAD:
            return self._leg.take_unread
        return default

"""An HTTP/2 connection as a leg: it runs on the bytes of a tunnel, whose other leg is a stream.

So a tunnel that one side asks for carries requests of the other side. What comes is given to the connection
in the next turn of the event loop: its buffer is the process's one read buffer, in which what comes may be.
"""

from __future__ import annotations

import asyncio
from typing import Any

from shared.errors import StreamResetError
from shared.http2.frames import CANCEL
from shared.net.http2.connection import Connection
from shared.net.legs.contract import Buffer, RelayEnd
from shared.net.legs.read_buffer import READ_BYTES
from shared.net.legs.stream import Stream


class ConnectionLeg:
    """The leg of `connection`, which has no transport yet, in the tunnel of `stream`."""

    def __init__(self, connection: Connection, stream: Stream) -> None:
        self.connection = connection
        self._stream = stream
        self._relay: RelayEnd | None = None
        self._received = bytearray()  # not given to the connection yet; the stream's window bounds it
        self._is_planned = False
        self._peer_ended = False
        self._is_paused = False  # the connection wants no data
        self._is_full = False  # the relay knows that
        self._is_gone = False
        self._is_over = False  # the connection has closed its transport

    # Leg.

    @property
    def buffered_bytes(self) -> int:
        return len(self._received) + self.connection.session.pending_bytes

    def join(self, relay: RelayEnd) -> None:
        self._relay = relay
        self.connection.connection_made(_Transport(self))

    def write(self, data: Buffer) -> None:
        if not self._is_gone:
            self._received += data
            self._plan()

    def write_eof(self) -> None:
        self._peer_ended = True
        self._plan()

    def pause_reading(self) -> None:
        if not self._is_gone:
            self.connection.pause_writing()

    def resume_reading(self) -> None:
        if not self._is_gone:
            self.connection.resume_writing()

    def close(self) -> None:
        self._lose(None)

    def abort(self) -> None:
        self._lose(ConnectionResetError("the tunnel that carried it is gone"))

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
            self.connection.feed(piece)
        if self._received:
            self._plan()
        elif self._peer_ended and not self._is_paused:
            self.end()
        self._tell_relay()

    def _tell_relay(self) -> None:
        is_full = self._is_paused or len(self._received) > READ_BYTES
        if is_full is not self._is_full and self._relay is not None:
            self._is_full = is_full
            if is_full:
                self._relay.full(self)
            else:
                self._relay.drained(self)

    # What the connection does with its transport.

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
        if self._relay is not None and not self.is_over:
            self._relay.received(self, data)

    def pause(self, is_paused: bool) -> None:
        """Whether the connection wants no data for now."""
        self._is_paused = is_paused
        self._tell_relay()
        if not is_paused:
            self._plan()

    def end(self) -> None:
        """The connection is over, after all that it has sent."""
        if not self.is_over:
            self._is_over = True
            asyncio.get_running_loop().call_soon(self._leave)
            if self._relay is not None:
                self._relay.ended(self)

    def break_off(self) -> None:
        """The connection is over, at once."""
        if not self._is_gone:
            self._is_over = True
            asyncio.get_running_loop().call_soon(self._leave)  # the connection has yet to say why

    def _leave(self) -> None:
        """It wants nothing more from the far end of the tunnel: all is complete if it has ended before, else
        the tunnel is broken."""
        relay = self._relay
        self._lose(None)
        if relay is not None:
            text = self.connection.cause or "connection closed by us"
            relay.failed(self, StreamResetError(text, CANCEL))

    def _lose(self, error: Exception | None) -> None:
        if self._is_gone:
            return
        self._is_gone = True
        self._relay = None
        self._received.clear()
        self.connection.connection_lost(error)


class _Transport(asyncio.Transport):
    """What the connection sees of its leg."""

    def __init__(self, leg: ConnectionLeg) -> None:
        super().__init__()
        self._leg = leg

    def write(self, data: Buffer) -> None:
        self._leg.send(data)

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
        return False

    def close(self) -> None:
        self._leg.end()

    def abort(self) -> None:
        self._leg.break_off()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "peername":
            return self._leg.peer_name
        if name == "sslcontext":
            return True  # nobody should read the socket himself
        return default

"""Small writes to a peer that does not read: kept in one piece, for each that waits by itself costs 0.7 KiB.

The event loop makes a request of each write that the kernel does not accept at once. A peer that is sent a
window of 1 MiB in pieces of 100 bytes, and reads none of them, would cost 8 MiB, in pieces of one byte 700.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from shared.net.legs.contract import Buffer, Leg, RelayEnd
from shared.net.legs.tcp_end import LastBytes

SMALL_BYTES = 4096
"""A write of as much may wait by itself: what it costs beside its bytes is a sixth of them."""

UNSENT_BYTES = 1024
"""Where more than so much waits, small writes are kept: so at most so many wait by themselves."""

MARK_BYTES = 64 << 10
"""What a leg holds before it is full: the event loop's own mark for a transport."""


class SmallWrites:
    """What waits behind a transport's unsent bytes, in the order in which it was written. Made when there is
    something to keep; the transport then says `resume_writing` once it has sent what it has."""

    __slots__ = ("_kept", "_transport")

    def __init__(self, transport: asyncio.Transport, data: Buffer) -> None:
        self._transport = transport
        self._kept = bytearray(data)

    def begin(self) -> None:
        """Has the transport say when nothing of it is left; it may say at once that it is not so."""
        self._transport.set_write_buffer_limits(high=0)

    def add(self, data: Buffer) -> None:
        """Keeps `data` as well."""
        self._kept += data

    def __len__(self) -> int:
        """How many bytes are kept."""
        return len(self._kept)

    def send(self) -> None:
        """Gives all of it to the transport, which has its own limits again."""
        kept, self._kept = bytes(self._kept), bytearray()
        self._transport.set_write_buffer_limits()
        self._transport.write(kept)


class TransportLeg(asyncio.BufferedProtocol):
    """The sending side of a leg on a TCP transport: what of it waits, and what the relay is told of that.

    `write` is each leg's own. It gives small pieces to `_small` as soon as `UNSENT_BYTES` wait, and calls
    `_become_full` when that makes more than `MARK_BYTES`."""

    __slots__ = ("_closing", "_full", "_relay", "_small", "_transport")

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._relay: RelayEnd | None = None
        self._full = False
        self._closing: LastBytes | None = None
        self._small: SmallWrites | None = None  # what waits behind the transport's unsent bytes

    def set_write_buffer_limits(self, high: int | None) -> None:
        """Of how many unsent bytes on the leg is full; None: the event loop's own mark."""
        self._transport.set_write_buffer_limits(high)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As the transport says it."""
        return self._transport.get_extra_info(name, default)

    @property
    def _unsent_bytes(self) -> int:
        kept = 0 if self._small is None else len(self._small)
        return kept + self._transport.get_write_buffer_size()

    def _become_full(self) -> None:
        self._full = True
        if self._relay is not None:
            self._relay.full(cast("Leg", self))

    def _send_small(self) -> None:
        small, self._small = self._small, None
        if small is not None:
            small.send()

    # asyncio.BufferedProtocol.

    def pause_writing(self) -> None:
        if self._small is None or self._unsent_bytes > MARK_BYTES:
            self._become_full()

    def resume_writing(self) -> None:
        self._full = False
        self._send_small()
        if self._full:
            return  # of what was small
        if self._closing is not None:
            self._closing.flushed()
        elif self._relay is not None:
            self._relay.drained(cast("Leg", self))

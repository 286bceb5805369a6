"""Doubles for what the kernel would otherwise time: a transport, a relay's end, the peer of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import hpack

from shared.errors import HboneError
from shared.http2.session import SessionLimits
from shared.net.http2.connection import Connection
from shared.net.legs.contract import Buffer, Leg
from shared.net.legs.read_buffer import READ_BUFFER, READ_BYTES
from shared.net.legs.stream import Stream
from shared.net.legs.tcp import TcpLeg
from tests.shared.http2.dialogue import (
    POST,
    PREFACE,
    Fields,
    headers,
    read,
    settings,
)

PEER = ("192.0.2.7", 4431)


class Wire(asyncio.Transport):
    """A transport whose other side is the test. It is congested when the test says so."""

    def __init__(self, *, half_close: bool = True) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.unsent = 0
        """What `get_write_buffer_size` says."""
        self.ended = False
        self.closed = False
        self.aborted = False
        self.reading: list[str] = []
        """How reading was "paused" and "resumed"."""
        self.gone = asyncio.Event()
        """Aborted, for who waits for it."""
        self.full: Callable[[], None] = lambda: None
        """Called after each write: what a transport does that is filled by it."""
        self.marks: tuple[int | None, int | None] = (None, None)
        self._half_close = half_close

    def take(self) -> bytes:
        """What has been written since the last call."""
        taken = b"".join(self.writes)
        self.writes.clear()
        return taken

    # asyncio.Transport.

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        assert not self.ended, "written after the end"
        self.writes.append(bytes(data))
        self.full()

    def write_eof(self) -> None:
        assert self._half_close
        self.ended = True

    def can_write_eof(self) -> bool:
        return self._half_close

    def pause_reading(self) -> None:
        self.reading.append("paused")

    def resume_reading(self) -> None:
        self.reading.append("resumed")

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True
        self.gone.set()

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.marks = (high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return PEER if name == "peername" and not self.is_closing() else default


class Seen:
    """A relay's end that writes down what a leg pushes; pieces of one body are joined."""

    def __init__(self) -> None:
        self.story: list[object] = []

    def received(self, leg: Leg, data: Buffer) -> None:
        if not self.story or not isinstance(self.story[-1], bytearray):
            self.story.append(bytearray())
        self.story[-1] += data  # type: ignore[operator]  # a bytearray

    def ended(self, leg: Leg) -> None:
        self.story.append("ended")

    def failed(self, leg: Leg, error: HboneError) -> None:
        self.story.append(f"failed: {error}")

    def full(self, leg: Leg) -> None:
        self.story.append("full")

    def drained(self, leg: Leg) -> None:
        self.story.append("drained")


def joined(leg: Leg) -> Seen:
    """The relay's end of `leg`."""
    seen = Seen()
    leg.join(seen)
    return seen


def on_a_wire() -> tuple[TcpLeg, Wire, Seen]:
    """A joined leg whose transport does as the test says."""
    leg, wire = TcpLeg(), Wire()
    leg.connection_made(wire)
    return leg, wire, joined(leg)


def feed(connection: Connection, data: bytes) -> None:
    """`data` comes in reads of `READ_BYTES`."""
    for at in range(0, len(data), READ_BYTES):
        piece = data[at : at + READ_BYTES]
        READ_BUFFER[: len(piece)] = piece
        connection.buffer_updated(len(piece))
        READ_BUFFER[: len(piece)] = b"\xee" * len(piece)  # whoever kept a view finds this


_FIRST = SessionLimits().stream_window_bytes
STEADY = SessionLimits(most_stream_window_bytes=_FIRST)
"""No window grows, whatever others of the process have."""


class Line:
    """A connection whose peer is played in frames. Both have said SETTINGS, which are taken."""

    def __init__(
        self,
        *,
        client: bool,
        limits: SessionLimits | None = None,
        on_request: Callable[[Stream], None] | None = None,
        half_close: bool = True,
        peer_settings: dict[int, int] | None = None,
    ) -> None:
        self.requests: list[Stream] = []
        self.changes = 0
        self.lost = 0
        self.connection = Connection(
            client=client,
            limits=limits or STEADY,
            on_request=on_request or self.requests.append,
            on_change=self._changed,
            on_lost=self._lost,
        )
        self.wire = Wire(half_close=half_close)
        self.connection.connection_made(self.wire)
        self._decoder = hpack.Decoder()
        self.get(b"" if client else PREFACE, settings(peer_settings))
        self.connection._flush()
        self.wire.take()
        self.changes = 0

    def get(self, *wire: bytes) -> None:
        """These frames come in one piece, as far as one read holds it."""
        feed(self.connection, b"".join(wire))

    async def sent(self) -> list[str]:
        """What has been written by the end of this turn, since the last call."""
        await asyncio.sleep(0)
        return read(self.wire.take(), self._decoder)

    def request(self, number: int = 1, fields: Fields | None = None, *, end: bool = False) -> Stream:
        """Server: a stream that the peer opens."""
        self.get(headers(number, fields or POST, end=end))
        return self.requests[-1]

    def lose(self, error: Exception | None = None) -> None:
        """The transport is gone."""
        self.wire.closed = True
        self.connection.connection_lost(error)

    def _changed(self) -> None:
        self.changes += 1

    def _lost(self, connection: Connection) -> None:
        assert connection is self.connection
        self.lost += 1

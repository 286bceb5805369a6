"""A tunnel's stream as the connection on which HTTP/1.1 is spoken to its target."""

from __future__ import annotations

from shared.errors import HboneError
from shared.net.legs.contract import Buffer, Leg, RelayEnd
from shared.net.legs.stream import Stream


class StreamLeg:
    """An `OriginLeg` over a stream; it is to its relay what the stream is to a relay of its own."""

    __slots__ = ("_relay", "_stream")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._relay: RelayEnd | None = None

    # OriginLeg.

    @property
    def unsent_bytes(self) -> int:
        return self._stream.unsent_bytes

    @property
    def buffered_bytes(self) -> int:
        return self._stream.buffered_bytes

    def keep_little(self, most_bytes: int) -> None:
        """What the stream keeps is bounded by the peer's window."""

    def unread(self) -> bytes:
        """Nothing: what comes before RST_STREAM has been pushed."""
        return b""

    def join(self, relay: RelayEnd) -> None:
        self._relay = relay
        self._stream.join(self)

    def write(self, data: Buffer) -> None:
        self._stream.write(data)

    def write_eof(self) -> None:
        self._stream.write_eof()

    def pause_reading(self) -> None:
        self._stream.pause_reading()

    def resume_reading(self) -> None:
        self._stream.resume_reading()

    def close(self) -> None:
        self._relay = None
        self._stream.write_eof()  # so that the target sees an end, and no reset
        self._stream.close()

    def abort(self) -> None:
        self._relay = None
        self._stream.abort()

    # RelayEnd.

    def received(self, leg: Leg, data: Buffer) -> None:
        if self._relay is not None:
            self._relay.received(self, data)

    def ended(self, leg: Leg) -> None:
        if self._relay is not None:
            self._relay.ended(self)

    def failed(self, leg: Leg, error: HboneError) -> None:
        if self._relay is not None:
            self._relay.failed(self, error)

    def full(self, leg: Leg) -> None:
        if self._relay is not None:
            self._relay.full(self)

    def drained(self, leg: Leg) -> None:
        if self._relay is not None:
            self._relay.drained(self)

"""A leg's bytes, to be awaited: what a look at a far side needs in place of a relay."""

from __future__ import annotations

import asyncio

from shared.errors import HboneError
from shared.net.legs.contract import Buffer, Leg


class StreamBytes:
    """What comes on a leg, up to `most` bytes; what comes beyond them is dropped. It has no deadline of
    its own."""

    def __init__(self, leg: Leg, most: int) -> None:
        self.data = bytearray()
        self.has_ended = False
        """The far side has ended in order."""
        self.error: HboneError | None = None
        """How the leg broke."""
        self._most = most
        self._changed = asyncio.Event()
        leg.join(self)

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self.has_ended or self.error is not None or len(self.data) >= self._most

    async def more(self) -> None:
        """Returns when something has come since the last call, or it is over."""
        if not self.over:
            await self._changed.wait()
        self._changed.clear()

    async def until(self, end: bytes) -> bool:
        """Returns when `end` is among what has come, or it is over; whether it is."""
        while end not in self.data and not self.over:
            await self.more()
        return end in self.data

    async def rest(self) -> bytes:
        """All of it."""
        while not self.over:
            await self.more()
        return bytes(self.data)

    async def broken(self) -> HboneError:
        """How the leg breaks, once it does, whether its far side has ended before or not."""
        while self.error is None:
            self._changed.clear()
            await self._changed.wait()
        return self.error

    # The relay's end of a leg.

    def received(self, leg: Leg, data: Buffer) -> None:
        self.data += data[: self._most - len(self.data)]
        self._changed.set()

    def ended(self, leg: Leg) -> None:
        self.has_ended = True
        self._changed.set()

    def failed(self, leg: Leg, error: HboneError) -> None:
        self.error = error
        self._changed.set()

    def full(self, leg: Leg) -> None: ...

    def drained(self, leg: Leg) -> None: ...

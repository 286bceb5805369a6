"""How the last few thousand streams of a connection ended: what a frame on one of them means depends on it,
and on what may have crossed its end (RFC 9113 section 5.1)."""

from __future__ import annotations

from enum import IntFlag

REMEMBERED_STREAMS = 4096
"""At most, and at least half of them. DATA that was on its way when we reset its stream is dropped without a
word; a forgotten stream is reset once more, which counts as a fault of the peer. That is six times what a
peer can have had open while our RST_STREAM was on its way, and 0.3 MiB a connection at most."""


class End(IntFlag):
    """How a stream was closed."""

    ENDED = 1
    """Both sides sent END_STREAM."""

    RESET_BY_PEER = 2
    RESET_HERE = 4

    CROSSED = 8
    """The peer's RST_STREAM may be on its way: one is no fault."""


# As plain numbers, which are not made into flags for each stream.
ENDED = int(End.ENDED | End.CROSSED)
"""Both sides have ended it."""

RESET_HERE = int(End.RESET_HERE | End.CROSSED)
"""We have sent RST_STREAM."""

RESET_BY_PEER = int(End.RESET_BY_PEER)
"""The peer has sent RST_STREAM."""


class PastStreams:
    """The ends of the last REMEMBERED_STREAMS streams, or of half as many: two generations, of which the
    older one is dropped when the younger one is full."""

    __slots__ = ("_old", "_young")

    def __init__(self) -> None:
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def remember(self, stream_id: int, end: int) -> None:
        """The stream is over, by ENDED, RESET_HERE or RESET_BY_PEER."""
        if len(self._young) >= REMEMBERED_STREAMS // 2:
            self._old, self._young = self._young, {}
        self._young[stream_id] = end

    def end_of(self, stream_id: int) -> End:
        """How a stream ended; no flag if it is forgotten, or never was."""
        return End(self._young.get(stream_id) or self._old.get(stream_id, 0))

    def crossing_came(self, stream_id: int) -> None:
        """The one RST_STREAM has come that may have crossed the end of the stream."""
        self.remember(stream_id, self.end_of(stream_id) & ~End.CROSSED)

"""The session's record of a stream, and its memory of those that are over (RFC 9113 section 5.1).

A stream is idle, then in `StreamTable.streams`, then over. What a frame on a stream that is over means
depends on how that came about, and what may have crossed it: `PastStreams` says so for the last few thousand.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Any

NO_LENGTH = -1
"""`body_left` of a body without content-length."""

NO_ANSWER_YET = -2
"""`body_left` of a response before its final headers: DATA is an error (RFC 9113 section 8.1)."""

NO_ANSWER_TO_HEAD_YET = -3
"""The same, and a content-length will tell of a body that does not follow."""

NO_ANSWER_TO_CONNECT_YET = -4
"""The same, and a content-length will be ignored (RFC 9110 section 9.3.6)."""

REMEMBERED_STREAMS = 4096
"""Streams that are over of which we know how they ended: half of them, while new ones come. DATA that was on
its way when we reset its stream is dropped without a word; a forgotten stream is reset once more, which
counts as a fault of the peer. That is more than a peer can have had open while our RST_STREAM was on its way,
six times over; 0.3 MiB a connection at most."""


class StreamState:
    """The session's record of one stream. `owner` is the net side's to use."""

    __slots__ = (
        "answered",
        "body_left",
        "credit",
        "held",
        "id",
        "local_ended",
        "over",
        "owner",
        "receive_window",
        "remote_ended",
        "send_window",
    )

    def __init__(self, stream_id: int, send_window: int, receive_window: int) -> None:
        self.id = stream_id
        self.send_window = send_window
        self.receive_window = receive_window
        self.credit = 0  # consumed bytes that we have not yet told the peer about
        self.held = 0  # received bytes that the owner has not consumed
        self.local_ended = False
        self.remote_ended = False
        self.answered = False  # we have sent response headers
        self.over = False  # ended both ways, or reset: nothing more goes in or out
        self.body_left = NO_LENGTH  # what content-length still promises
        self.owner: Any = None

    def takes(self, payload: int, *, ends: bool) -> bool:
        """Counts so many bytes of DATA; whether there may be any, and content-length, if there is one, agrees
        (RFC 9113 section 8.1.1)."""
        if self.body_left < 0:
            return self.body_left == NO_LENGTH
        left = self.body_left - payload
        self.body_left = max(left, 0)
        return left >= 0 and not (ends and left)


class End(IntFlag):
    """How a stream came to be over."""

    ENDED = 1
    """Both sides sent END_STREAM."""

    RESET_BY_PEER = 2
    RESET_HERE = 4

    CROSSED = 8
    """The peer's RST_STREAM may be on its way: one is no fault."""


_ENDED_HERE = int(End.ENDED | End.CROSSED)
_RESET_HERE = int(End.RESET_HERE | End.CROSSED)
_RESET_BY_PEER = int(End.RESET_BY_PEER)


class PastStreams:
    """How streams ended, for the last REMEMBERED_STREAMS or half as many: two generations, of which the older
    one goes when the younger one is full."""

    __slots__ = ("_old", "_young")

    def __init__(self) -> None:
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def ended(self, stream_id: int) -> None:
        """Both sides have ended it."""
        self._remember(stream_id, _ENDED_HERE)

    def reset_here(self, stream_id: int) -> None:
        """We have sent RST_STREAM."""
        self._remember(stream_id, _RESET_HERE)

    def reset_by_peer(self, stream_id: int) -> None:
        """The peer has sent RST_STREAM."""
        self._remember(stream_id, _RESET_BY_PEER)

    def end_of(self, stream_id: int) -> End:
        """How a stream ended; nothing for one that is forgotten, or never was."""
        return End(self._young.get(stream_id) or self._old.get(stream_id, 0))

    def crossing_has_come(self, stream_id: int) -> None:
        """The one RST_STREAM that may have crossed the end of the stream."""
        self._remember(stream_id, self.end_of(stream_id) & ~End.CROSSED)

    def _remember(self, stream_id: int, end: int) -> None:
        if len(self._young) >= REMEMBERED_STREAMS // 2:
            self._old, self._young = self._young, {}
        self._young[stream_id] = end

"""Which connection has to go when a server has no place for one more. A pure function.

The rules:

1. As long as there is room nobody has to go, however many connections one source has: behind a NAT, or the
   kubelet of a node, many clients are one address.
2. A newcomer gets the place of a connection whose source has at least as many as its own, itself included.
   So no source can crowd out one that has fewer.
3. First go slow ones of any source (a request that is not complete, a response that is not read), then the
   others. Of both first those of the source that has most connections; of its own an idle one before one that
   has just begun; of these the one that has been so for longest.
4. A request that waits for its answer has to go only for a newcomer whose source has fewer connections, the
   last one that came; one whose answer is being made never.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TypeVar

from shared.address import client_network

SLOW_S = 0.25
"""A request has come, and its response been taken, within a round trip, which takes milliseconds where
probes and scrapers are."""


class Activity(enum.Enum):
    """What a connection is at."""

    MOVING = enum.auto()
    """Bytes are on their way: a request to us, or a response to the client."""

    IDLE = enum.auto()
    """Between two requests."""

    WAITING = enum.auto()
    """Its request is complete, and waits for its turn."""

    ANSWERING = enum.auto()
    """Its request is being answered."""

    LEAVING = enum.auto()
    """It has had all, and needs no place any more."""


class Occupant(Protocol):
    """A connection, as far as it matters here."""

    @property
    def source(self) -> str:
        """What `source_of` gave for its address."""
        ...

    @property
    def activity(self) -> Activity: ...

    @property
    def since(self) -> float:
        """When that began, in the loop's seconds."""
        ...


T = TypeVar("T", bound=Occupant)


def to_evict(newcomer: T, occupants: Iterable[T], most: int, now: float) -> T | None:
    """Who has to go so that `newcomer`, which is one of `occupants`, leaves no more than `most` of them;
    None: nobody, or nobody may. The caller knows which, for it has counted them."""
    counted = [one for one in occupants if one.activity is not Activity.LEAVING]
    if len(counted) <= most:
        return None
    held = Counter(one.source for one in counted)
    own = held[newcomer.source]

    def may_go(one: T) -> bool:
        if one is newcomer or one.activity is Activity.ANSWERING:
            return False
        return held[one.source] > own if one.activity is Activity.WAITING else held[one.source] >= own

    def order(one: T) -> tuple[int, int, bool, float]:
        if one.activity is Activity.WAITING:
            return 2, -held[one.source], False, -one.since
        is_idle = one.activity is Activity.IDLE
        is_slow = not is_idle and now - one.since >= SLOW_S
        return (0 if is_slow else 1), -held[one.source], not is_idle, one.since

    return min(filter(may_go, counted), key=order, default=None)


def source_of(peer: object) -> str:
    """The source that a client belongs to: its IPv4 address, its IPv6 network, "" for a socket without
    addresses. `peer` is what a transport has as `peername`."""
    if not isinstance(peer, tuple) or not peer:
        return ""
    return client_network(str(peer[0]))

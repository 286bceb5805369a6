"""What happened to the connections of one origin, in plain integers.

Several origins may share one object, so nothing here is ever set, only added to and subtracted from.
"""

from __future__ import annotations

IDLE = "idle"
AGE = "age"
ADDRESS = "address"
SILENT = "silent"
GOAWAY = "goaway"
LOST = "lost"
STOPPED = "stopped"
REVOKED = "revoked"
EXPIRED = "expired"

REASONS = (IDLE, AGE, ADDRESS, SILENT, GOAWAY, LOST, STOPPED, REVOKED, EXPIRED)
"""Why a connection accepted no new streams any more: no streams for too long, too old, its address no longer
the name's, no answer to a PING, the peer said GOAWAY, it broke, we stop, its certificate was revoked, or has
ended."""


class OriginCounts:
    """The connections to one origin since the start, and who waits for one."""

    __slots__ = (
        "closed_by_reason",
        "dials_failed_total",
        "draining",
        "opened_total",
        "refused_total",
        "waiting",
    )

    def __init__(self) -> None:
        self.opened_total = 0
        self.closed_by_reason = dict.fromkeys(REASONS, 0)
        self.draining = 0
        """Connections that are open and accept no new streams."""
        self.dials_failed_total = 0
        self.waiting = 0
        """Who waits for a stream now."""
        self.refused_total = 0
        """Who did not get to wait, because too many did."""

    @property
    def open(self) -> int:
        """Connections that are open now."""
        return self.opened_total - sum(self.closed_by_reason.values())

    def opened(self) -> None:
        """A connection has opened; `closed` follows exactly once."""
        self.opened_total += 1

    def closed(self, reason: str = LOST) -> None:
        """A connection has ended; `reason` is one of REASONS."""
        self.closed_by_reason[reason] += 1

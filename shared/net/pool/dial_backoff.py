"""When an origin that could not be reached may be dialled again.

No clock and no timer: time is a parameter, in seconds of a steady clock. The longest wait is doubled with
each failure, and the wait is taken by chance from all of it ("full jitter"), so that many gateways do not
come back at the same moment.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.backoff import doubled_s

FIRST_S = 0.1
"""The longest first wait: a service that restarts is back in less time than anybody notices."""

MOST_S = 10.0
"""The longest wait: a mesh client's own connect timeout, so each client sees one attempt at least."""

FORGOTTEN_S = 60.0
"""Failures so long ago say nothing any more."""


class DialBackoff:
    """The failures of one origin."""

    __slots__ = ("_chance", "_failed_at", "_failures", "_next", "reason")

    def __init__(self, chance: Callable[[], float]) -> None:
        """`chance` gives a number in 0..1."""
        self.reason = ""
        """Why the last dial failed; empty after a success."""
        self._chance = chance
        self._failures = 0
        self._failed_at = 0.0
        self._next = 0.0

    def failed(self, now: float, reason: str) -> None:
        """A dial failed `now`."""
        if now - self._failed_at > FORGOTTEN_S:
            self._failures = 0
        longest_s = doubled_s(FIRST_S, MOST_S, self._failures)
        self._failures += 1
        self._failed_at = now
        self._next = now + longest_s * self._chance()
        self.reason = reason

    def succeeded(self) -> None:
        """A peer has answered."""
        self._failures = 0
        self._next = 0.0
        self.reason = ""

    def age_s(self, now: float) -> float:
        """Seconds since the last failure; 0 if there was none."""
        return now - self._failed_at if self._failures else 0.0

    def left(self, now: float) -> float:
        """Seconds until the next attempt; 0 if there may be one `now`."""
        return max(0.0, self._next - now)

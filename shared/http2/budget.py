"""A token bucket without a clock: how much a connection may ask for of what costs us more than the peer."""

from __future__ import annotations


class Budget:
    """Holds at most `burst` units and gains `per_s` a second."""

    __slots__ = ("_burst", "_left", "_per_s", "_seen")

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = burst
        self._seen: float | None = None

    def spend(self, now: float, units: float = 1.0) -> bool:
        """Takes `units` at the time `now`, in seconds of any steady clock; False if they are not there."""
        self._gain(now)
        self._left -= units
        return self._left >= 0

    def left(self, now: float) -> float:
        """What there is at the time `now`; below 0: more was taken than there was."""
        self._gain(now)
        return self._left

    def _gain(self, now: float) -> None:
        if self._seen is not None and now > self._seen:
            self._left = min(self._burst, self._left + (now - self._seen) * self._per_s)
        self._seen = now

    def earn(self, units: float) -> None:
        """Adds `units`, beyond the burst as well: the peer has done what allows it as many more."""
        self._left += units

"""How long to wait after failures: twice as long after each, up to a bound, and a part of that by chance, so
that many that failed together do not come back together."""

from __future__ import annotations

_MAX_DOUBLINGS = 32
"""More would only make the number longer, until it is none."""


def doubled_s(first_s: float, most_s: float, failures: int) -> float:
    """The longest wait in seconds: `first_s` after the first failure, twice as much after each further one,
    at most `most_s`. `failures` counts those in a row before the last one (0: that was the first)."""
    return min(first_s * 2.0 ** min(failures, _MAX_DOUBLINGS), most_s)


def half_or_more(longest_s: float, chance: float) -> float:
    """A part of a wait, by a `chance` in 0..1: whoever was last had at least half of it. Where no wait at all
    does no harm, `longest_s * chance` spreads attempts more."""
    return longest_s * (1.0 + chance) / 2

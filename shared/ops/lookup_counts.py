"""What happened to look-ups of names, in plain numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class LookupCounts:
    """Since the start."""

    def __init__(self, failures: Iterable[str]) -> None:
        """`failures` are the kinds of failure that are counted apart."""
        self.found = 0
        self.abandoned = 0
        """Those that nobody waited for any more."""
        self.failed = dict.fromkeys(failures, 0)
        self.reused = 0
        """Questions that another one's look-up, or an answer that was kept, has answered."""
        self.seconds = 0.0
        """That look-ups have taken together."""


class SlotNumbers(NamedTuple):
    """Look-ups at this moment, and their bounds."""

    running: int
    most_running: int
    waiting: int
    most_waiting: int


class ResolverNumbers(NamedTuple):
    """A resolver at this moment."""

    counts: LookupCounts
    clients: SlotNumbers
    """Look-ups for clients."""
    settings: SlotNumbers
    """Look-ups of names in our own settings."""
    kept: int
    """Answers that are kept."""
    most_kept: int

"""How long to wait before a program that has died is started again."""

from __future__ import annotations

from shared.backoff import doubled_s

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0

STEADY_S = 60.0
"""After one that has run for so long the first pause counts again."""


class Restarts:
    """The pauses of one program."""

    def __init__(self) -> None:
        self._failures = 0

    def pause_s(self, ran_s: float) -> float:
        """The seconds to wait, after it has run for `ran_s` seconds."""
        if ran_s >= STEADY_S:
            self._failures = 0
        pause_s = doubled_s(FIRST_PAUSE_S, LONGEST_PAUSE_S, self._failures)
        self._failures += 1
        return pause_s

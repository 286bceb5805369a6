"""How often we have been asked to stop, and by which signal: the first time in order, the second time at
once.

One request often arrives as several signals: a terminal sends SIGINT to a whole group of processes, and
`sudo`, `timeout` or a shell's own handler among them passes it on. What comes within AGAIN_S is the same
request.
"""

from __future__ import annotations

import signal

AGAIN_S = 0.5
"""Relayed signals are milliseconds apart, a person's second one half a second or more."""


class StopRequests:
    """Counts requests."""

    def __init__(self) -> None:
        self.count = 0
        self.signal = signal.SIGTERM
        """The latest one's."""
        self._at_s = 0.0

    def add(self, number: int, now_s: float) -> bool:
        """Whether the signal `number`, at `now_s` on any steady clock, is a request of its own."""
        if self.count and now_s - self._at_s < AGAIN_S:
            return False
        self.count += 1
        self.signal = signal.Signals(number)
        self._at_s = now_s
        return True

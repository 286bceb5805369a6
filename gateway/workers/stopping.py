"""Counts the requests to stop: the first one starts a drain, the second one cuts it short.

One request often arrives as several signals: a terminal sends SIGINT to a whole group of processes, and
`sudo`, `timeout` or a shell in it passes the signal on. So signals within SAME_REQUEST_S are one request.
"""

from __future__ import annotations

import signal

SAME_REQUEST_S = 0.5
"""Seconds. Passed-on signals are milliseconds apart, those of a person at least half a second."""


class StopRequests:
    """Counts requests."""

    def __init__(self) -> None:
        self.count = 0
        self.signal = signal.SIGTERM
        """Of the latest request."""
        self._at_s = 0.0

    def add(self, number: int, now_s: float) -> bool:
        """Counts the signal `number`, which came at `now_s` on a steady clock; False if it belongs to the
        request before."""
        if self.count and now_s - self._at_s < SAME_REQUEST_S:
            return False
        self.count += 1
        self.signal = signal.Signals(number)
        self._at_s = now_s
        return True

"""How far the receive windows of a process may grow together, beyond the size with which streams begin.

A grown window is memory that a peer may fill if its reader stops, so all of them have one bound. A stream
gets no more than half of what others have left: there is always some for the next, and n streams that ask
again and again end up with equal parts, each one in n + 1 of the bound.

A stream that holds nothing and has not asked for `IDLE_S` gives its part to others who need it. Its window
stays open, as HTTP/2 cannot take it back. Should it then receive more than its reader takes, that counts
towards `limits.max_buffered`, as everything does.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.http2.session_stream import SessionStream

IDLE_S = 10.0
"""Seconds after which a stream that consumed nothing, and holds nothing, no longer counts."""

LEAST_BYTES = 1 << 20
"""Less is nothing that a stream would gain by."""

DEFAULT_BYTES = 64 << 20
"""The bound where nobody has set one."""


class WindowGrowth:
    """The bound, and which streams have parts of it. `most()` are bytes, and may change at any time."""

    def __init__(self, most: Callable[[], int] = lambda: DEFAULT_BYTES) -> None:
        self.most = most
        self.granted_bytes = 0
        """The parts of all streams together."""
        self._parts: dict[SessionStream, tuple[int, float]] = {}  # bytes, and when; the idle ones first

    def ask(self, stream: SessionStream, wanted_bytes: int, now: float) -> int:
        """The part that `stream` has from now on, instead of the one that it had: `wanted_bytes` or less.
        `now` is in seconds of a steady clock."""
        self.release(stream)
        most = self.most()
        if wanted_bytes > (most - self.granted_bytes) // 2:
            self._forget_idle(now)
        granted = min(wanted_bytes, (most - self.granted_bytes) // 2)
        if granted < min(LEAST_BYTES, wanted_bytes) or granted <= 0:
            return 0
        self._parts[stream] = (granted, now)
        self.granted_bytes += granted
        return granted

    def release(self, stream: SessionStream) -> None:
        """The stream has no part any more."""
        part, _ = self._parts.pop(stream, (0, 0.0))
        self.granted_bytes -= part

    def _forget_idle(self, now: float) -> None:
        for stream, (_, at) in list(self._parts.items()):
            if now - at < IDLE_S:
                break
            part, _ = self._parts.pop(stream)
            if stream.held:
                self._parts[stream] = (part, now)  # looked at again when the others have been
            else:
                self.granted_bytes -= part


PROCESS = WindowGrowth()
"""That of this process: memory is the process's, whoever receives into it."""

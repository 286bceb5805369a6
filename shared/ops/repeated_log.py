"""Log lines that a peer can cause as often as it likes: one of a kind at once, then one now and then."""

from __future__ import annotations

import asyncio
import logging

EVERY_S = 10.0
"""Between two lines of a kind: often enough for whoever watches the log, and six a minute at most."""


class RepeatedLog:
    """Writes warnings to `log`. Of those that come within `every_s` seconds of a line of their kind only the
    last is written, with how many there were, when that time is over."""

    def __init__(self, log: logging.Logger, every_s: float = EVERY_S) -> None:
        self._log = log
        self._every_s = every_s
        self._kinds: dict[str, _Kind] = {}

    def warning(self, kind: str, text: str) -> None:
        """Writes `text`, or counts it."""
        known = self._kinds.get(kind)
        if known is None:
            self._log.warning("%s", text)
            self._kinds[kind] = _Kind(self._wait(kind))
        else:
            known.count += 1
            known.text = text

    def forget(self, kind: str) -> None:
        """The next of its kind is written at once; what has been counted is not told, for it is over."""
        known = self._kinds.pop(kind, None)
        if known is not None:
            known.timer.cancel()

    def close(self) -> None:
        """Writes what has been counted and not been told."""
        for kind in self._kinds.values():
            kind.timer.cancel()
            self._tell(kind)
        self._kinds.clear()

    def _wait(self, kind: str) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._every_s, self._over, kind)

    def _over(self, kind: str) -> None:
        known = self._kinds[kind]
        if known.count:
            self._tell(known)
            known.timer = self._wait(kind)
        else:
            del self._kinds[kind]

    def _tell(self, kind: _Kind) -> None:
        if kind.count:
            self._log.warning("%s (%d of these since the last line)", kind.text, kind.count)
            kind.count = 0


class _Kind:
    """What has come of a kind since its last line."""

    __slots__ = ("count", "text", "timer")

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self.timer = timer
        self.count = 0
        self.text = ""

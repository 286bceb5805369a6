"""One direction of a tunnel has ended: for how long the other may be silent."""

from __future__ import annotations

import asyncio
from typing import Protocol

from shared.errors import HalfClosedError, HboneError


class HalfClosed(Protocol):
    """A relay of which one direction has ended."""

    @property
    def sent_bytes(self) -> int:
        """So far, towards the upstream."""

    @property
    def received_bytes(self) -> int:
        """So far, from the upstream."""

    def abort(self, error: HboneError) -> None:
        """Resets both ends."""


class HalfClosedClock:
    """Aborts `relay` once no byte has moved for `timeout_s` seconds, and for twice as long at most; until
    `cancel`."""

    __slots__ = ("_downstream_ended", "_moved_bytes", "_relay", "_timeout_s", "_timer")

    _timer: asyncio.TimerHandle

    def __init__(self, relay: HalfClosed, timeout_s: float, *, downstream_ended: bool) -> None:
        """`downstream_ended` says which direction it was, for the error's text."""
        self._relay = relay
        self._timeout_s = timeout_s
        self._downstream_ended = downstream_ended
        self._wait()

    def cancel(self) -> None:
        """The relay is over."""
        self._timer.cancel()

    def _wait(self) -> None:
        self._moved_bytes = self._relay.sent_bytes + self._relay.received_bytes
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._check)

    def _check(self) -> None:
        if self._relay.sent_bytes + self._relay.received_bytes != self._moved_bytes:
            self._wait()
            return
        who = "the client" if self._downstream_ended else "the far side"
        text = f"half-closed: {who} has ended, and for {self._timeout_s:g} s nothing came back"
        self._relay.abort(HalfClosedError(text))

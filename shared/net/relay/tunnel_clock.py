"""How long an open tunnel may be silent, and how long it may live at all.

A tunnel has no timer of its own: a sweep compares its byte counters with those of the last check.

The rules:

1. A tunnel through which no byte went, either way, for the idle timeout is reset, as Envoy's `tcp_proxy` does
   it: for all we know somebody waits for an answer, and an orderly end would look like one.
2. A tunnel has a lifetime, shortened at random by up to `JITTER`, so that tunnels opened together (after a
   restart) do not all end together. Its last part, `GRACE` of it, is for ending gently: the first time that
   nothing has moved for `QUIET_S` and nothing waits to be sent, the client gets its FIN. What we carry is
   mTLS that we cannot read, so silence is all we can go by: a sidecar's connection is pooled, mostly at rest
   between two requests, and one that ends at rest is replaced without any request failing. What was never at
   rest is reset at the end of its lifetime: bytes are then lost, but at least nobody takes them for a whole,
   and the log says why, which it does not when Cloud Run's front end does it.
3. The idle timeout counts for open tunnels as soon as it is changed. A lifetime is settled at the start.

A deadline is met late by up to two intervals of the sweep, one for seeing that a byte was the last: each is a
twentieth of the idle timeout, or of the grace, and a second at least.
"""

from __future__ import annotations

import asyncio
import random
from typing import Protocol

from shared.errors import HboneError, IdleError, LifetimeError, LifetimeResetError
from shared.net.relay.sweep import Sweep

JITTER = 0.1
"""Part of a lifetime that chance may take off: five of 55 minutes spread the new dials of a crowd."""

GRACE = 0.1
"""Part of a lifetime, its last, in which a tunnel at rest is ended: as long again."""

QUIET_S = 5.0
"""Without a byte for so long a tunnel is at rest: longer than most servers think, and far below a grace of
five minutes, so that all but the busiest have such a moment."""

LEAST_INTERVAL_S = 1.0
"""Between two checks, which cost 0.4 µs a tunnel."""

MOST_INTERVAL_S = 60.0
"""The same, for timeouts of hours."""

LOOKS = 20
"""Checks in an idle timeout or a grace: how exactly it is met."""


class Carrying(Protocol):
    """An open tunnel: a `Relay` or a `SpliceRelay`."""

    @property
    def sent_bytes(self) -> int:
        """So far, towards the upstream."""

    @property
    def received_bytes(self) -> int:
        """So far, from the upstream."""

    @property
    def over(self) -> bool:
        """Whether it has ended."""

    @property
    def error(self) -> HboneError | None:
        """Why it ended; None after an orderly end."""

    @property
    def broken_downstream(self) -> bool:
        """Of an error: it was the downstream that broke."""

    def abort(self, error: HboneError) -> None:
        """Resets both ends."""

    def expire(self, error: HboneError) -> bool:
        """Ends it in good order if it is at rest; False if it is not."""


class _Watched:
    __slots__ = ("lifetime_s", "moved_bytes", "quiet_since", "relay", "resets_at")

    def __init__(self, relay: Carrying, now: float, lifetime_s: float) -> None:
        self.relay = relay
        self.moved_bytes = relay.sent_bytes + relay.received_bytes
        self.quiet_since = now
        self.lifetime_s = lifetime_s
        self.resets_at = now + lifetime_s * random.uniform(1 - JITTER, 1) if lifetime_s else 0.0


class TunnelClock:
    """Watches open tunnels. `idle_s` may be changed at any time (rule 3); 0 lets them be silent for ever."""

    def __init__(self, idle_s: float = 0.0, lifetime_s: float = 0.0) -> None:
        """`lifetime_s` is for tunnels that are watched without one of their own; 0: for ever."""
        self._idle_s = idle_s
        self.lifetime_s = lifetime_s
        """For tunnels to come."""
        self._loop = asyncio.get_running_loop()
        self._watched: dict[Carrying, _Watched] = {}
        self._shortest_s = 0.0  # of all lifetimes so far
        self._sweep = Sweep(self._watched.values, self._check, interval_s=self._interval, done=self._rest)

    @property
    def idle_s(self) -> float:
        """Seconds of silence after which a tunnel is reset."""
        return self._idle_s

    @idle_s.setter
    def idle_s(self, seconds: float) -> None:
        if seconds != self._idle_s:
            self._idle_s = seconds
            self._sweep.stop()  # the next check may be due sooner
            if self._watched:
                self._start()

    def watch(self, relay: Carrying, lifetime_s: float | None = None) -> None:
        """From now on `relay`, which has just begun, has these deadlines; nothing if it is over already."""
        if relay.over:
            return
        lifetime_s = self.lifetime_s if lifetime_s is None else lifetime_s
        self._watched[relay] = _Watched(relay, self._loop.time(), lifetime_s)
        if lifetime_s and not 0 < self._shortest_s <= lifetime_s:
            self._shortest_s = lifetime_s
            self._sweep.stop()
        self._start()

    def forget(self, relay: Carrying) -> None:
        """`relay` is over."""
        self._watched.pop(relay, None)

    def close(self) -> None:
        """Watches nothing any more."""
        self._watched.clear()
        self._sweep.stop()

    def _start(self) -> None:
        if self._idle_s or self._shortest_s:
            self._sweep.start()

    def _rest(self) -> None:
        if not self._watched:
            self._sweep.stop()
            self._shortest_s = 0.0

    def _interval(self) -> float:
        looked_for = [seconds for seconds in (self._idle_s, self._shortest_s * GRACE) if seconds]
        shortest = min(looked_for, default=MOST_INTERVAL_S * LOOKS)
        return min(max(shortest / LOOKS, LEAST_INTERVAL_S), MOST_INTERVAL_S)

    def _check(self, watched: _Watched) -> None:
        relay = watched.relay
        if relay.over:
            return
        now = self._loop.time()
        moved = relay.sent_bytes + relay.received_bytes
        if moved != watched.moved_bytes:
            watched.moved_bytes = moved
            watched.quiet_since = now
        quiet_s = now - watched.quiet_since
        if self._idle_s and quiet_s >= self._idle_s:
            relay.abort(IdleError(f"no byte either way for {self._idle_s:g} s, which is the idle timeout"))
        elif watched.lifetime_s:
            self._check_age(watched, now, quiet_s)

    def _check_age(self, watched: _Watched, now: float, quiet_s: float) -> None:
        left_s = watched.resets_at - now
        grace_s = watched.lifetime_s * GRACE
        if left_s <= 0:
            text = f"never at rest before the end of its lifetime of up to {watched.lifetime_s:g} s"
            watched.relay.abort(LifetimeResetError(text))
        elif left_s <= grace_s and quiet_s >= min(QUIET_S, grace_s / 4):
            text = f"at rest near the end of its lifetime of up to {watched.lifetime_s:g} s"
            watched.relay.expire(LifetimeError(text))

"""When a silent peer is asked for a sign of life by PING, and when it is given up.

1. Any byte that arrives is a sign of life, so a busy connection is never asked.
2. After `Keepalive.interval_s` of silence the peer is asked; after `timeout_s` more it is given up.
3. Two kinds of silence are not the peer's fault, and it gets another `timeout_s` for each: this process was
   held up and has not read; or the PING has not arrived, because on a slow line it waits behind an upload of
   which the peer still acknowledges bytes.
"""

from __future__ import annotations

import asyncio
from enum import Enum

from shared.net.legs.tcp_end import acknowledged_bytes, unsent_bytes

LATE_S = 1.0
"""A timer that is so late says that this process was held up."""

STREAMS_TIMEOUT_S = 15.0
"""How long a PING may go unanswered while streams are open. Long enough for TCP to repeat a lost packet
several times; ztunnel waits 20 s."""


class When(Enum):
    """While what a peer has to be there."""

    ALWAYS = "always"
    STREAMS = "streams"
    """A stream is open."""

    STALLED = "stalled"
    """Something waits for room, as the peer reads nothing. A reader that pauses is honest, and may do so
    for as long as a tunnel may be idle; one that is there answers."""


class Keepalive:
    """How a peer is watched. No dataclass: making one costs each start of `hbone` 0.25 ms."""

    __slots__ = ("interval_s", "timeout_s", "when")

    def __init__(self, when: When, interval_s: float, timeout_s: float) -> None:
        """Times in seconds; `interval_s` 0: not at all."""
        self.when = when
        self.interval_s = interval_s
        self.timeout_s = timeout_s


def while_connected(interval_s: float) -> Keepalive:
    """For connections that are open for weeks, mostly idle, over NAT that forgets idle TCP connections after
    minutes; and where a person waits."""
    return Keepalive(When.ALWAYS, interval_s, interval_s)


def while_streams(interval_s: float, timeout_s: float = STREAMS_TIMEOUT_S) -> Keepalive:
    """For servers that punish PINGs without streams, as Google's front ends do."""
    return Keepalive(When.STREAMS, interval_s, timeout_s)


WHEN_STALLED = Keepalive(When.STALLED, 40.0, 20.0)
"""For clients of ours, which need no other watch: what waits for them is our memory."""


class Verdict(Enum):
    """What is to be done now."""

    WAIT = "wait"
    ASK = "ask"
    GIVE_UP = "give up"


class Liveness:
    """One peer. It has no timer: its owner calls `check` at `due`."""

    __slots__ = ("_acknowledged", "_ahead", "_heard_before", "_is_asked", "_since", "due", "keepalive")

    def __init__(self, keepalive: Keepalive, now: float) -> None:
        """All times are the event loop's, in seconds."""
        self.keepalive = keepalive
        self.due = 0.0
        """When to check next."""
        self._since = now  # silence does not count before
        self._is_asked = False
        self._heard_before = 0.0  # when the peer was heard last before it was asked
        self._acknowledged: int | None = None  # bytes that the peer's kernel had taken at the last check
        self._ahead = 0  # bytes that it has to take before the PING

    def begin(self, now: float, heard_at: float) -> bool:
        """From now on the peer has to be there; it was last heard at `heard_at` (0: never). False: it is not
        watched."""
        if not self.keepalive.interval_s:
            return False
        if self.keepalive.when is When.STALLED:
            self._since = now
        self._is_asked = False
        self.due = self._silent_at(heard_at)
        return True

    def check(self, now: float, heard_at: float, transport: asyncio.Transport) -> Verdict:
        """What to do `now`; sets `due` anew."""
        was_due = self.due
        if not self._is_asked or heard_at != self._heard_before:
            self._is_asked = False
            self.due = self._silent_at(heard_at)
            if now < self.due:
                return Verdict.WAIT
            self._is_asked, self._heard_before = True, heard_at
            self._acknowledged = acknowledged_bytes(transport)
            self._ahead = unsent_bytes(transport)
            verdict = Verdict.ASK
        elif now > was_due + LATE_S or self._is_behind_an_upload(transport):
            verdict = Verdict.WAIT
        else:
            return Verdict.GIVE_UP
        self.due = now + self.keepalive.timeout_s
        return verdict

    def _silent_at(self, heard_at: float) -> float:
        """When the peer will have been silent for the interval."""
        return max(self._since, heard_at) + self.keepalive.interval_s

    def _is_behind_an_upload(self, transport: asyncio.Transport) -> bool:
        """Whether bytes that were sent before the PING were still arriving since the last check."""
        now, before = acknowledged_bytes(transport), self._acknowledged
        if now is None or before is None:
            return False
        arrived = now - before
        was_behind, self._acknowledged = self._ahead > 0, now
        self._ahead -= arrived
        return was_behind and arrived > 0

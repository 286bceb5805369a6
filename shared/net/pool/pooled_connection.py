"""One connection of a pool and its clock: how long it is kept, and how long it gets new streams.

One timer is for all of that. No stream that opens or ends moves it: when it is due it checks what has
happened since.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from shared.net.http2.connection import PREFACE_TIMEOUT_S, Connection
from shared.net.http2.liveness import while_streams
from shared.net.pool.pool_limits import PoolLimits
from shared.net.tls.certificate_expiry import next_check_s
from shared.ops import pool_counts

AGE_JITTER = 0.1
"""The part of its age that a connection may end earlier, so that not all that opened together end so."""

IN_VAIN_S = 30.0
"""How long an idle connection is kept to an origin that has served no tunnel yet. Any client that can name an
origin makes us connect to it; a token for its first tunnel may need as long."""

OPEN_ENDED_S = float("inf")


class PooledConnection:
    """A connection and what the pool knows of it.

    `changed(self)` is called when it may have room, or may have become useless; `lost(self)` when it is gone;
    `retire(self, reason)` when it is to accept no new streams. `is_kept(self)` says whether it stays though
    it is idle.
    """

    __slots__ = (
        "_changed",
        "_idle_since",
        "_is_kept",
        "_is_made",
        "_jitter",
        "_loop",
        "_lost",
        "_retire",
        "_timer",
        "_timer_due",
        "_wall_clock",
        "absences",
        "born",
        "connection",
        "is_proven",
        "is_worth_it",
        "limits",
        "reason",
    )

    connection: Connection

    def __init__(
        self,
        limits: PoolLimits,
        *,
        jitter: float,
        is_worth_it: bool = False,
        changed: Callable[[PooledConnection], None],
        lost: Callable[[PooledConnection], None],
        retire: Callable[[PooledConnection, str], None],
        is_kept: Callable[[PooledConnection], bool] = lambda member: False,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`jitter` in 0..1 decides how much of AGE_JITTER this connection loses; `wall_clock` has seconds
        since the epoch."""
        self.limits = limits
        self.reason = ""
        """Why it accepts no new streams, one of `pool_counts.REASONS`; empty while it does."""
        self.is_proven = False
        """The peer has said its SETTINGS, and the pool knows it."""
        self.is_worth_it = is_worth_it
        """Somebody has had what it wanted of this origin, on a connection that was there when it was made."""
        self.absences = 0
        """Look-ups in a row whose answer did not have its peer's address."""
        self._loop = asyncio.get_running_loop()
        self.born = self._loop.time()
        self._is_made = False
        self._jitter = jitter
        self._changed = changed
        self._lost = lost
        self._retire = retire
        self._is_kept = is_kept
        self._wall_clock = wall_clock
        self._idle_since: float | None = self.born  # None: it has streams
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = OPEN_ENDED_S  # uvloop's handle says it in whole milliseconds only

    def make(self) -> Connection:
        """Makes `connection`, for a transport that there is."""
        self._is_made = True
        self.connection = Connection(
            client=True,
            limits=self.limits.session,
            on_change=self._on_change,
            on_lost=self._on_lost,
            keepalive=while_streams(self.limits.ping_interval_s, self.limits.ping_timeout_s),
        )
        return self.connection

    def discard(self) -> None:
        """Drops what was made for a dial that failed."""
        if self._is_made:
            self.connection.abort("the dial was given up")

    @property
    def loss_reason(self) -> str:
        """Why a connection that is of no more use accepts no new streams, one of `pool_counts.REASONS`."""
        if not self.connection.lost:
            return pool_counts.GOAWAY
        return pool_counts.SILENT if self.connection.unanswered_s else pool_counts.LOST

    @property
    def has_expired(self) -> bool:
        """Whether the peer's certificate has ended, so that no new handshake would succeed."""
        return self._wall_clock() >= self.connection.certificate_ends

    @property
    def room(self) -> int:
        """How many more streams it accepts now."""
        left = self.limits.streams_per_connection - self.connection.open_streams
        return min(left, self.connection.room) if left > 0 else 0

    def count_streams(self) -> None:
        """To be called when a stream was opened or ended."""
        has_streams = self._idle_since is None
        if self._timer is None or has_streams != (self.connection.open_streams > 0):
            self.keep_time()  # else nothing has come nearer

    def use_limits(self, limits: PoolLimits) -> None:
        """From now on these count."""
        self.limits = limits
        self.connection.watch(while_streams(limits.ping_interval_s, limits.ping_timeout_s))
        self.keep_time()

    def keep_time(self) -> None:
        """To be called when something may have come nearer."""
        if self.connection.open_streams:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._loop.time()
        due = self._due()
        if due < self._timer_due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_due = due
            self._timer = self._loop.call_at(due, self._check)

    def forget(self) -> None:
        """Stops the clock."""
        if self._timer is not None:
            self._timer.cancel()

    # The clock.

    def _due(self) -> float:
        """When there will be something to do, as it looks now."""
        return min(self._age_due(), self._idle_due(), self._expiry_due())

    def _age_due(self) -> float:
        age_s = self.limits.max_age_s
        if self.reason or not age_s:
            return OPEN_ENDED_S
        return self.born + age_s * (1 - AGE_JITTER * self._jitter)

    def _idle_due(self) -> float:
        if self.reason or self._idle_since is None or self._is_kept(self):
            return OPEN_ENDED_S
        idle_s = self.limits.idle_timeout_s
        if not (self.connection.has_carried or self.is_worth_it):
            idle_s = min(idle_s, IN_VAIN_S)
        if not self.is_proven:  # somebody may wait for just this connection's SETTINGS
            idle_s = max(idle_s, PREFACE_TIMEOUT_S)
        return self._idle_since + idle_s

    def _expiry_due(self) -> float:
        """Of the wall clock, which may be set, and goes on while the machine sleeps: so it is checked
        before."""
        if self.reason or self.connection.certificate_ends == OPEN_ENDED_S:
            return OPEN_ENDED_S
        left_s = self.connection.certificate_ends - self._wall_clock()
        return self._loop.time() + next_check_s(left_s)

    def _check(self) -> None:
        self._timer_due = OPEN_ENDED_S
        self._timer = None
        now = self._loop.time()
        if self.connection.lost:
            return
        if self.has_expired:
            self._retire(self, pool_counts.EXPIRED)
        elif self._age_due() <= now:
            self._retire(self, pool_counts.AGE)
        elif self._idle_due() <= now:
            self._retire(self, pool_counts.IDLE)
        if not self.connection.lost:
            self.keep_time()

    # What the connection tells.

    def _on_change(self) -> None:
        self._changed(self)

    def _on_lost(self, _: Connection) -> None:
        self.forget()
        self._lost(self)

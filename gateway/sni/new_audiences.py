"""How many tokens may be asked for audiences that no tunnel has been opened with yet.

A token's audience may have a client's name filled in (`https://{service}.a.run.app`), and a client proves
nothing: one that says random names could have as many tokens minted. An audience has proved itself once a
tunnel request with its token was answered with 200; for others there is a bound for each address that clients
come from, and one for all together. Both are token buckets: so many at once, and so many in each minute from
then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.config.limit_settings import Limits
from gateway.ports.admission import NEW_AUDIENCES, NEW_AUDIENCES_PER_SOURCE, network_of
from gateway.rules.templates import shown
from shared.errors import LimitError
from shared.http2.budget import Budget

MINUTE_S = 60.0

MAX_SOURCES = 10_000
"""Addresses whose tokens are counted, as many as there may be connections. The one that has had none for
longest is forgotten: then the bound for all has to do."""


class NewAudiences:
    """Counts the tokens that were asked for new audiences. All calls are made on the event loop's thread."""

    def __init__(
        self,
        limits: Limits,
        *,
        share: Callable[[int], int] = lambda total: total,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Of `limits` this process has its `share`; `now` is a steady clock in seconds."""
        self._share = share
        self._now = now
        self._most = (0, 0)
        self._all: Budget | None = None
        self._sources: dict[str, Budget] = {}
        self.use_limits(limits)

    def use_limits(self, limits: Limits) -> None:
        """Goes by `limits` from now on; a change of them forgets what was counted."""
        most = self._in_all(limits.max_new_audiences), self._in_all(limits.max_new_audiences_per_source)
        if most != self._most:
            self._most = most
            self._all = Budget(most[0], most[0] / MINUTE_S) if most[0] else None
            self._sources.clear()

    @property
    def most(self) -> int:
        """How many there may be in a minute; 0: no bound."""
        return self._most[0]

    @property
    def left(self) -> float:
        """Of them, those that may be asked for now; 0 without a bound."""
        return 0.0 if self._all is None else max(0.0, self._all.left(self._now()))

    def check(self, peer: str, audience: str) -> None:
        """Raises LimitError if no token may be asked for `audience` now for the client `peer`, HOST:PORT."""
        now, source = self._now(), network_of(peer)
        own = self._sources.get(source)
        if own is not None and own.left(now) < 1:
            raise _refusal(audience, source, self._most[1], NEW_AUDIENCES_PER_SOURCE)
        if self._all is not None and self._all.left(now) < 1:
            raise _refusal(audience, "clients together", self._most[0], NEW_AUDIENCES)

    def spend(self, peer: str, audience: str) -> None:
        """One is asked for now. Raises LimitError as `check`; then nothing is counted."""
        self.check(peer, audience)
        now, most = self._now(), self._most[1]
        if self._all is not None:
            self._all.spend(now)
        if most:
            source = network_of(peer)
            own = self._sources.pop(source, None) or Budget(most, most / MINUTE_S)
            self._sources[source] = own  # behind all others
            own.spend(now)
            if len(self._sources) > MAX_SOURCES:
                del self._sources[next(iter(self._sources))]

    def _in_all(self, total: int) -> int:
        return self._share(total) if total else 0


def _refusal(audience: str, who: str, most: int, limit: str) -> LimitError:
    return LimitError(
        f"no token is asked for {shown(audience)}: no tunnel was ever opened with one, and {who} had {most} "
        f"such audiences tried within a minute, which is {limit}; if these are services of yours, raise it",
        limit,
    )

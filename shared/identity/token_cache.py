"""The one cache of minted tokens, by identity and audience.

Owned here: which tokens are kept, who asks for a new one and who waits for it. When a token is to be replaced
is `token_life.py`'s, how one is minted the minter's (`minting.py`).

The rules:

1. A token is at hand for as long as it is in use: one that was asked for within its last lifetime is replaced
   ahead of its end by a timer, or by whoever asks first. What nobody asks for any more is let go.
2. One request at a time for each key. Callers without a usable token wait for it together; one that gives up
   leaves it to the others. Those with a usable token never wait.
3. The table has a bound. For a new key the one that was asked for longest ago goes, but none whose token is
   being minted; if that are all, the new one is refused.
4. There is a usable token or a TokenError, which says for whom, from whom and why not: never "none".

One timer serves all keys. It runs on the loop's clock, so it only ever comes late: what is sent, and what is
asked for, is decided by the wall clock when it is used.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator

from shared.errors import TokenError, UpstreamError
from shared.identity.minting import Minted, Minter
from shared.identity.token_counts import TokenCounts, TokenStatus
from shared.identity.token_life import TokenLife
from shared.identity.tokens import at_utc, demand_fit
from shared.tasks import spawn

log = logging.getLogger("hbone.tokens")

MAX_TOKENS = 1000
"""Keys at once, some 3 MiB. An audience may have a client's name filled in, so there has to be a bound; one
more costs one more token request."""

MAX_FLIGHTS = 64
"""Requests at once, of all keys: metadata servers and token services have quotas, and each is a
connection."""

MINT_TIMEOUT_S = 30.0
"""For a new token, the wait for one of these included. Minters have shorter deadlines of their own."""

LEAST_IDLE_S = 60.0
"""A token that was asked for within so many seconds is in use, however short its life."""

LONGEST_LOOK_S = 60.0
"""Between two looks at all keys, so that one after a sleep of the machine is not far."""

SHORTEST_LOOK_S = 0.05
"""A look costs 0.1 ms for a thousand keys."""


class _Entry:
    """One key's token."""

    __slots__ = ("asked_at_s", "audience", "counts", "flight", "life", "minter")

    def __init__(self, minter: Minter, audience: str, counts: TokenCounts, life: TokenLife) -> None:
        self.minter = minter
        self.audience = audience
        self.counts = counts
        self.life = life
        self.asked_at_s = 0.0
        self.flight: asyncio.Task[Minted | TokenError] | None = None
        """The one request under way. A task shows its result in `repr`, so that is no bare token."""


Key = tuple[str, str]
"""Identity and audience."""


class TokenCache:
    """All minted tokens of a process. All calls are made on the event loop's thread."""

    def __init__(
        self,
        counts: Callable[[str, str], TokenCounts] | None = None,
        *,
        most: int = MAX_TOKENS,
        now: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`counts` gives the counts of an identity and audience, `now` is the wall clock in seconds since
        1970, `chance` gives a number in 0..1."""
        self.most = most
        """Keys at once."""
        self._counts = counts if counts is not None else lambda identity, audience: TokenCounts()
        self._now = now
        self._chance = chance
        self._entries: dict[Key, _Entry] = {}
        self._slots = asyncio.Semaphore(MAX_FLIGHTS)
        self._timer: asyncio.TimerHandle | None = None
        self._look_at_s = 0.0

    def source(self, minter: Minter, audience: str) -> CachedToken:
        """The tokens of `minter` for `audience`; costs nothing until it is asked."""
        return CachedToken(self, minter, audience)

    @property
    def size(self) -> int:
        """Keys now."""
        return len(self._entries)

    def statuses(self) -> Iterator[TokenStatus]:
        """What may be told of each."""
        for (identity, audience), entry in self._entries.items():
            life = entry.life
            yield TokenStatus(
                identity=identity,
                audience=audience,
                minted_at_s=life.minted_at_s if life.token else None,
                expires_at_s=life.expires_at_s if life.token else None,
                failure=str(life.failure or ""),
                failed_at_s=life.failed_at_s if life.failure else None,
            )

    def look(self) -> None:
        """What the timer does: asks for what is due, lets go of what is not in use any more."""
        now = self._now()
        for key, entry in list(self._entries.items()):
            if entry.flight is not None:
                continue
            entry.asked_at_s = min(entry.asked_at_s, now)  # the clock may have been set back
            if now - entry.asked_at_s > max(entry.life.length_s, LEAST_IDLE_S):
                del self._entries[key]
            elif now >= entry.life.refresh_at_s:
                self._fly(entry)
        self._stop_timer()
        if self._entries:
            grounded = (e.life.refresh_at_s for e in self._entries.values() if e.flight is None)
            self._look_again(min(grounded, default=now + LONGEST_LOOK_S))

    def close(self) -> None:
        """Lets go of all tokens; who waits for one gets a TokenError."""
        self._stop_timer()
        for entry in self._entries.values():
            if entry.flight is not None:
                entry.flight.cancel()
        self._entries.clear()

    # For sources.

    def at_hand(self, key: Key) -> str | None:
        """A usable token, if there is one; has a new one asked for if that is due."""
        entry = self._entries.get(key)
        return None if entry is None else self._usable(entry)

    async def token(self, key: Key, minter: Minter) -> str:
        """A usable token. Raises TokenError."""
        entry = self._entries.get(key) or self._new_entry(key, minter)
        token = self._usable(entry)
        if token is not None:
            return token
        failure = entry.life.remembered(self._now())
        if failure is not None and entry.flight is None:
            raise TokenError(str(failure), failure.reason) from failure
        flight = self._fly(entry)
        # Not awaited itself: a caller that gives up must not take the answer from the others.
        await asyncio.wait({flight})
        if flight.cancelled():
            raise TokenError(f"no token for {entry.audience}: we stop")
        outcome = flight.result()
        if isinstance(outcome, TokenError):
            raise TokenError(str(outcome), outcome.reason) from outcome
        return outcome.token

    def invalidate(self, key: Key, rejected: str | None) -> None:
        """The far side has rejected the token, or `rejected`."""
        entry = self._entries.get(key)
        if entry is not None and entry.life.rejected(rejected, self._now()):
            entry.counts.failed("rejected")
            self._look_again(entry.life.refresh_at_s)

    # Keys.

    def _new_entry(self, key: Key, minter: Minter) -> _Entry:
        if len(self._entries) >= self.most:
            idle = [item for item in self._entries.items() if item[1].flight is None]
            if not idle:
                self._counts(*key).failed("limit")
                raise TokenError(f"no token for {key[1]}: {self.most} others are being asked for", "limit")
            oldest, _ = min(idle, key=lambda item: item[1].asked_at_s)
            del self._entries[oldest]
        entry = self._entries[key] = _Entry(minter, key[1], self._counts(*key), TokenLife(self._chance))
        return entry

    def _usable(self, entry: _Entry) -> str | None:
        now = entry.asked_at_s = self._now()
        life = entry.life
        if not life.usable(now):
            return None
        if now >= life.refresh_at_s:
            self._fly(entry)
        return life.token

    # Requests.

    def _fly(self, entry: _Entry) -> asyncio.Task[Minted | TokenError]:
        """The one request under way, started when there is none."""
        if entry.flight is None:
            entry.life.asking(self._now())
            entry.flight = spawn(self._fetch(entry), name=f"token for {entry.audience}")
            entry.flight.add_done_callback(lambda _: self._landed(entry))
        return entry.flight

    def _landed(self, entry: _Entry) -> None:
        entry.flight = None
        if self._entries:  # else we are closed
            self._look_again(entry.life.refresh_at_s)

    async def _fetch(self, entry: _Entry) -> Minted | TokenError:
        """Fetches and stores a token. A failure is returned, not raised: several callers may be waiting for
        it, each in need of a traceback of its own, or nobody at all."""
        life, minter = entry.life, entry.minter
        try:
            try:
                async with asyncio.timeout(MINT_TIMEOUT_S), self._slots:
                    minted = await minter.mint(entry.audience)
            except TimeoutError as error:
                text = f"no token from {minter.identity}: none within {MINT_TIMEOUT_S:g} s"
                raise TokenError(text, "unreachable") from error
            demand_fit(minted, entry.audience, minter.identity, self._now())
        except TokenError as error:
            return self._failed(entry, error)
        if life.failure is not None:
            log.info("there is a new token for %s again", entry.audience)
        life.minted(minted, self._now())
        entry.counts.refreshed()
        return minted

    def _failed(self, entry: _Entry, cause: TokenError) -> TokenError:
        life, whose, now = entry.life, entry.minter.identity, self._now()
        asked = "asked" if whose in str(cause) else f"{whose} was asked"
        error = TokenError(f"{cause} ({asked} for {entry.audience})", _reason(cause))
        error.__cause__ = cause
        if life.usable(now) and life.failure is None:
            log.warning("%s; the old one serves until %s", error, at_utc(life.usable_until_s))
        life.failed(error, now)
        entry.counts.failed(error.reason)
        return error

    # The timer.

    def _look_again(self, at_s: float) -> None:
        now = self._now()
        at_s = min(max(at_s, now + SHORTEST_LOOK_S), now + LONGEST_LOOK_S)
        if self._timer is None or at_s < self._look_at_s:
            self._stop_timer()
            self._timer = asyncio.get_running_loop().call_later(at_s - now, self.look)
            self._look_at_s = at_s

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class CachedToken:
    """A `TokenSource`: one key of a cache, whether the cache has it just now or not."""

    __slots__ = ("_cache", "_key", "_minter")

    def __init__(self, cache: TokenCache, minter: Minter, audience: str) -> None:
        """Raises ValueError when `audience` is empty."""
        if not audience:
            raise ValueError("empty audience")
        self._cache = cache
        self._minter = minter
        self._key = (minter.identity, audience)

    async def token(self) -> str:
        return await self._cache.token(self._key, self._minter)

    def at_hand(self) -> str | None:
        return self._cache.at_hand(self._key)

    def invalidate(self, rejected: str | None = None) -> None:
        self._cache.invalidate(self._key, rejected)


def _reason(error: TokenError) -> str:
    """A minter need not say more than what its connection said."""
    return (
        "unreachable"
        if error.reason == "other" and isinstance(error.__cause__, UpstreamError)
        else error.reason
    )

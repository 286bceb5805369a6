"""The one cache of minted tokens, by identity and audience.

The rules:

1. A token stays as long as it is in use: if it was asked for within its last lifetime, it is replaced ahead
   of its end, by a timer or by whoever asks first. A token that nobody asks for any more is dropped.
2. One request at a time for each key. Callers without a usable token wait for it together; a caller that
   gives up leaves it to the others. Callers with a usable token never wait.
3. A key is new until the far side has accepted a token of it (`accepted`), unless its audience is fixed:
   any other may have a client's name filled in, and is worth little. New keys have bounds of their own, in
   the table and in requests at once; nothing is asked for them ahead, and a caller may be refused one
   (`admit`). So they push out no other key, and no other key waits for them. Which keys were accepted is
   remembered when their tokens are dropped.
4. Each of the two classes has a bound. To make room for another key of its class, the key that was asked
   for longest ago goes, but none whose token is being minted, and an accepted one only for an accepted one;
   if none can go, the other key is refused.
5. There is a usable token or a TokenError, which says for whom, from whom and why not: never "none".

One timer serves all keys. It runs on the loop's clock, so it can only be late: the wall clock decides, at the
time of use, what is sent and what is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from shared.credentials.tokens.minting import Minted, Minter
from shared.credentials.tokens.token_life import TokenLife
from shared.credentials.tokens.tokens import demand_fit
from shared.errors import TokenError, UpstreamError
from shared.ops.token_counts import TokenCounts, TokenStatus
from shared.tasks import spawn
from shared.trust.token_claims import at_utc

log = logging.getLogger("hbone.tokens")

MAX_TOKENS = 1000
"""Keys at once that are not new, some 3 MiB; one more costs one more token request."""

MAX_NEW_TOKENS = 500
"""New keys at once. A tunnel that is being opened holds its token itself: nobody misses one
that is let go of here."""

MAX_ACCEPTED = 4096
"""Keys that are remembered as accepted, as many as the gateway's cached targets; the one that was accepted
longest ago is forgotten, and new again."""

MAX_FLIGHTS = 64
"""Requests at once, of all keys: metadata servers and token services have quotas, and each is a
connection."""

MAX_NEW_FLIGHTS = 16
"""Of them, those for new keys: the others need not wait for these."""

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

    __slots__ = ("asked_at_s", "audience", "counts", "flight", "is_new", "life", "minter", "was_accepted")

    def __init__(
        self, minter: Minter, audience: str, counts: TokenCounts, life: TokenLife, *, is_new: bool
    ) -> None:
        self.is_new = is_new
        """Which of the two classes it is in."""
        self.was_accepted = False
        """The far side has accepted a token of this key."""
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
        counts: Callable[[str, str, bool], TokenCounts] | None = None,
        *,
        most: int = MAX_TOKENS,
        most_new: int = MAX_NEW_TOKENS,
        now: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`counts` gives the counts of an identity and audience, and is told whether they are new, `now` is
        the wall clock in seconds since 1970, `chance` gives a number in 0..1."""
        self.most = most
        """Keys at once that are not new."""
        self.most_new = most_new
        """New keys at once."""
        self._counts = counts if counts is not None else lambda *_: TokenCounts()
        self._now = now
        self._chance = chance
        self._entries: dict[Key, _Entry] = {}
        self._new = 0  # of them, the new ones
        self._accepted: dict[Key, None] = {}  # whether there are entries or not; the last accepted is last
        self._slots = asyncio.Semaphore(MAX_FLIGHTS)
        self._new_slots = asyncio.Semaphore(MAX_NEW_FLIGHTS)
        self._timer: asyncio.TimerHandle | None = None
        self._look_at_s = 0.0

    def source(self, minter: Minter, audience: str, *, is_fixed: bool = False) -> CachedToken:
        """The tokens of `minter` for `audience`, which is fixed or has something of a client's name in it;
        costs nothing until it is asked."""
        return CachedToken(self, minter, audience, is_fixed)

    @property
    def size(self) -> int:
        """Keys now that are not new."""
        return len(self._entries) - self._new

    @property
    def new_size(self) -> int:
        """New keys now."""
        return self._new

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
                accepted=entry.was_accepted,
            )

    def look(self) -> None:
        """What the timer does: asks for what is due, lets go of what is not in use any more."""
        now = self._now()
        for key, entry in list(self._entries.items()):
            if entry.flight is not None:
                continue
            entry.asked_at_s = min(entry.asked_at_s, now)  # the clock may have been set back
            if now - entry.asked_at_s > max(entry.life.length_s, LEAST_IDLE_S):
                self._let_go(key)
            elif not entry.is_new and now >= entry.life.refresh_at_s:
                self._fly(entry)
        self._stop_timer()
        if self._entries:
            due = (e.life.refresh_at_s for e in self._entries.values() if not e.is_new and e.flight is None)
            self._look_again(min(due, default=now + LONGEST_LOOK_S))

    def close(self) -> None:
        """Lets go of all tokens; who waits for one gets a TokenError."""
        self._stop_timer()
        for entry in self._entries.values():
            if entry.flight is not None:
                entry.flight.cancel()
        self._entries.clear()
        self._new = 0

    # For sources.

    def token_now(self, key: Key) -> str | None:
        """A usable token, if there is one; has a new one asked for if that is due."""
        entry = self._entries.get(key)
        return None if entry is None else self._usable(entry)

    async def token(
        self, key: Key, minter: Minter, admit: Callable[[], None] | None, *, is_fixed: bool = False
    ) -> str:
        """A usable token. Raises TokenError, or what `admit` raises, which is called before a token is asked
        for a new key."""
        entry = self._entries.get(key)
        if entry is not None:
            token = self._usable(entry)
            if token is not None:
                return token
            failure = entry.life.remembered(self._now())
            if failure is not None and entry.flight is None:
                raise TokenError(str(failure), failure.reason) from failure
        if (
            admit is not None
            and (entry is None or entry.flight is None)
            and not is_fixed
            and self.is_new(key)
        ):
            admit()
        flight = self._fly(entry or self._new_entry(key, minter, is_fixed))
        # Not awaited itself: a caller that gives up must not take the answer from the others.
        await asyncio.wait({flight})
        if flight.cancelled():
            raise TokenError(f"no token for {key[1]}: we stop")
        outcome = flight.result()
        if isinstance(outcome, TokenError):
            raise TokenError(str(outcome), outcome.reason) from outcome
        return outcome.token

    def invalidate(self, key: Key, rejected: str | None) -> None:
        """The far side has rejected the token, or `rejected`."""
        entry = self._entries.get(key)
        if entry is not None and entry.life.rejected(rejected, self._now()):
            entry.counts.failed("rejected")
            if not entry.is_new:
                self._look_again(entry.life.refresh_at_s)

    def is_new(self, key: Key) -> bool:
        """Whether the far side has accepted no token of this key, as far as is remembered."""
        entry = self._entries.get(key)
        return key not in self._accepted if entry is None else entry.is_new

    def accepted(self, key: Key) -> None:
        """It has accepted one now."""
        entry = self._entries.get(key)
        if entry is None:
            self._remember(key)
        elif not entry.was_accepted and (not entry.is_new or self._has_room(is_new=False)):
            entry.was_accepted = True
            self._remember(key)
            if entry.is_new:
                entry.is_new = False
                entry.counts = self._counts(*key, False)
                self._new -= 1
                if entry.flight is None:
                    self._look_again(entry.life.refresh_at_s)

    # Keys.

    def _new_entry(self, key: Key, minter: Minter, is_fixed: bool) -> _Entry:
        was_accepted = key in self._accepted
        is_new = not (was_accepted or (is_fixed and self.size < self.most))
        counts = self._counts(*key, is_new)
        if not self._has_room(is_new=is_new):
            counts.failed("limit")
            most = self.most_new if is_new else self.most
            raise TokenError(f"no token for {key[1]}: {most} others are being asked for", "limit")
        life = TokenLife(self._chance)
        entry = self._entries[key] = _Entry(minter, key[1], counts, life, is_new=is_new)
        entry.was_accepted = was_accepted
        entry.asked_at_s = self._now()
        self._new += is_new
        return entry

    def _has_room(self, *, is_new: bool) -> bool:
        """Whether there is room for one more key of this class; makes it, if it can."""
        size, most = (self._new, self.most_new) if is_new else (self.size, self.most)
        if size < most:
            return True
        idle = [
            (entry.was_accepted, entry.asked_at_s, key)
            for key, entry in self._entries.items()
            if entry.is_new == is_new and entry.flight is None
        ]
        if idle:
            self._let_go(min(idle)[2])
        return bool(idle)

    def _let_go(self, key: Key) -> None:
        entry = self._entries.pop(key)
        self._new -= entry.is_new
        if entry.was_accepted:
            self._remember(key)  # as of now: its token was in use until now

    def _remember(self, key: Key) -> None:
        self._accepted.pop(key, None)
        self._accepted[key] = None
        if len(self._accepted) > MAX_ACCEPTED:
            del self._accepted[next(iter(self._accepted))]

    def _usable(self, entry: _Entry) -> str | None:
        now = entry.asked_at_s = self._now()
        life = entry.life
        if not life.usable(now):
            return None
        if now >= life.refresh_at_s and not entry.is_new:
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
            self._look_again(self._now() + LONGEST_LOOK_S if entry.is_new else entry.life.refresh_at_s)

    async def _fetch(self, entry: _Entry) -> Minted | TokenError:
        """Fetches and stores a token. A failure is returned, not raised: several callers may be waiting for
        it, each in need of a traceback of its own, or nobody at all."""
        life, minter = entry.life, entry.minter
        try:
            try:
                async with asyncio.timeout(MINT_TIMEOUT_S), self._slot(entry):
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

    @asynccontextmanager
    async def _slot(self, entry: _Entry) -> AsyncIterator[None]:
        """One of the requests that there may be at once."""
        if entry.is_new:
            async with self._new_slots, self._slots:
                yield
        else:
            async with self._slots:
                yield

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

    __slots__ = ("_cache", "_is_fixed", "_key", "_minter")

    def __init__(self, cache: TokenCache, minter: Minter, audience: str, is_fixed: bool) -> None:
        """Raises ValueError when `audience` is empty."""
        if not audience:
            raise ValueError("empty audience")
        self._cache = cache
        self._is_fixed = is_fixed
        self._minter = minter
        self._key = (minter.identity, audience)

    async def token(self, admit: Callable[[], None] | None = None) -> str:
        return await self._cache.token(self._key, self._minter, admit, is_fixed=self._is_fixed)

    @property
    def is_new(self) -> bool:
        return not self._is_fixed and self._cache.is_new(self._key)

    def accepted(self) -> None:
        self._cache.accepted(self._key)

    def token_now(self) -> str | None:
        return self._cache.token_now(self._key)

    def invalidate(self, rejected: str | None = None) -> None:
        self._cache.invalidate(self._key, rejected)


def _reason(error: TokenError) -> str:
    """A minter need not say more than what its connection said."""
    return (
        "unreachable"
        if error.reason == "other" and isinstance(error.__cause__, UpstreamError)
        else error.reason
    )

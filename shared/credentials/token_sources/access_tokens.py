"""One access token, kept as long as it is good: it proves us to Google's services before an ID token.

One request at a time, and a failure is remembered for a moment. Unlike ID tokens it is not refreshed ahead:
few ask for it, and once an hour.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from shared.credentials.tokens.minting import Minted
from shared.credentials.tokens.token_life import UNUSABLE_AHEAD_S
from shared.errors import TokenError
from shared.tasks import spawn

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
"""What access tokens of Google's are asked for: all that the roles of their owner allow."""

FAILURE_MEMORY_S = 1.0
"""How long a failure answers for a new attempt, so that audiences whose tokens are due together do not ask a
service that fails one after the other."""


class AccessTokens(Protocol):
    """Where an access token comes from."""

    @property
    def identity(self) -> str:
        """Who it is for, or the place that decides about it."""
        ...

    async def access_token(self) -> Minted:
        """A token that is good for another minute at least, unless its service gives only shorter ones.
        Raises TokenError."""
        ...

    def drop(self, token: str) -> None:
        """Says that `token` was rejected, so the next one has to be new."""
        ...


class KeptAccessToken:
    """What `fetch` gives, until a minute before its end."""

    def __init__(
        self,
        identity: str,
        fetch: Callable[[], Awaitable[Minted]],
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`fetch` has its own timeouts and raises TokenError; `now` gives seconds since 1970."""
        self.identity = identity
        self._fetch = fetch
        self._now = now
        self._kept: Minted | None = None
        self._failure: TokenError | None = None
        self._failed_at_s = 0.0
        self._flight: asyncio.Task[Minted | TokenError] | None = None

    async def access_token(self) -> Minted:
        now_s = self._now()
        if self._kept is not None and now_s < self._kept.expires_at_s - UNUSABLE_AHEAD_S:
            return self._kept
        if self._failure is not None and 0 <= now_s - self._failed_at_s < FAILURE_MEMORY_S:
            raise TokenError(str(self._failure), self._failure.reason) from self._failure
        if self._flight is None or self._flight.done():
            self._flight = spawn(self._fly(), name=f"access token of {self.identity}")
        # Shielded: a caller that gives up must not take the answer from the others.
        outcome = await asyncio.shield(self._flight)
        if isinstance(outcome, TokenError):
            raise TokenError(str(outcome), outcome.reason) from outcome
        return outcome

    def drop(self, token: str) -> None:
        if self._kept is not None and self._kept.token == token:
            self._kept = None

    async def _fly(self) -> Minted | TokenError:
        """A failure is returned: several may wait for it, each in need of an own traceback, or nobody."""
        try:
            self._kept = await self._fetch()
        except TokenError as error:
            self._failure, self._failed_at_s = error, self._now()
            return error
        self._failure = None
        return self._kept

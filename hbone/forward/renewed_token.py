"""A command's token, kept for the tunnels to come: a source of `destination` gets a new one each time.

`TokenLife` decides until when it is sent, and when a new one is asked for. The cache of hgate is for many
audiences; here is one source, which has its audience already.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from shared.credentials.tokens.minting import Minted
from shared.credentials.tokens.token_life import TokenLife
from shared.credentials.tokens.tokens import FileToken, NoToken, TokenSource
from shared.errors import TokenError
from shared.tasks import spawn
from shared.trust.token_claims import claims_of, expiry_of

OPAQUE_LIFE_S = 60.0
"""How long a token is kept that does not say when it ends."""


class RenewedToken:
    """A `TokenSource`: the token of another one, as long as it is good."""

    def __init__(
        self,
        source: TokenSource,
        *,
        now: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`now` is the wall clock in seconds since 1970, `chance` gives a number in 0..1."""
        self._source = source
        self._now = now
        self._life = TokenLife(chance)
        self._asking: asyncio.Task[TokenError | None] | None = None  # for all who wait

    is_new = False

    async def token(self, admit: Callable[[], None] | None = None) -> str:
        """The token that is kept, or a new one. Raises TokenError."""
        now = self._now()
        if self._life.usable(now):
            if now >= self._life.refresh_at_s:
                self._ask()
            return self._life.token
        failure = self._life.remembered(now) or await asyncio.shield(self._ask())
        if failure is not None:
            raise TokenError(str(failure), failure.reason) from failure
        return self._life.token

    def token_now(self) -> str | None:
        return self._life.token if self._life.usable(self._now()) else None

    def accepted(self) -> None:
        return None

    def invalidate(self, rejected: str | None = None) -> None:
        if self._life.rejected(rejected, self._now()):
            self._source.invalidate(rejected)

    def close(self) -> None:
        """Asks for nothing more."""
        if self._asking is not None:
            self._asking.cancel()

    def _ask(self) -> asyncio.Task[TokenError | None]:
        if self._asking is None:
            self._life.asking(self._now())
            self._asking = spawn(self._fetch(), name="get a new token")
        return self._asking

    async def _fetch(self) -> TokenError | None:
        try:
            token = await self._source.token()
            if token is None:
                raise TokenError("the token's source has none")
            self._life.minted(Minted(token, self._end_of(token)), self._now())
        except TokenError as error:
            self._life.failed(error, self._now())
            return error
        finally:
            self._asking = None
        return None

    def _end_of(self, token: str) -> float:
        try:
            return expiry_of(claims_of(token))
        except ValueError:
            return self._now() + OPAQUE_LIFE_S


def renewed(source: TokenSource) -> TokenSource:
    """`source`, asked only when a token is needed that is not there; one that costs nothing is returned as it
    is."""
    return source if isinstance(source, NoToken | FileToken | RenewedToken) else RenewedToken(source)

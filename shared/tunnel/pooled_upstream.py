"""Who is asked for a tunnel on a connection of a pool, with a token if one is wanted.

1. A token that has to be fetched is fetched once there is a connection: a name that leads nowhere, or to
   somebody else, costs none.
2. A token that was rejected is dropped: it may have been revoked before its time. One other is tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.credentials.tokens.tokens import TokenSource
from shared.http2.events import Headers
from shared.net.dial import Origin
from shared.net.http2.answers import AskedOf
from shared.net.legs.stream import Stream
from shared.net.pool.pool import Pool
from shared.tunnel.opening import Upstream


class TokenUpstream(Upstream):
    """The part that has to do with the token."""

    _token: str | None = None
    """What the next request is sent with."""
    _rejected: str | None = None

    def __init__(self, source: TokenSource) -> None:
        self._source = source

    def accepted(self) -> None:
        self._source.accepted()

    def reject_token(self) -> bool:
        if self._token is None or self._rejected is not None:
            return False
        self._rejected = self._token
        self._source.invalidate(self._token)
        return True

    async def renew_token(self) -> bool:
        self._token = await self._fetch()
        return self._token != self._rejected

    async def _fetch(self) -> str | None:
        """Raises TokenError."""
        return await self._source.token()


class PooledUpstream(TokenUpstream):
    """The origin `origin`, asked for one tunnel."""

    def __init__(
        self,
        pool: Pool,
        origin: Origin,
        source: TokenSource,
        headers: Callable[[str | None], Headers],
        *,
        name: str,
        asked_of: type[AskedOf] = AskedOf,
    ) -> None:
        """`headers(token)` are the request's. The log has `name`."""
        super().__init__(source)
        self._pool = pool
        self._origin = origin
        self._headers = headers
        self._name = name
        self._asked_of = asked_of

    def __str__(self) -> str:
        return self._name

    @property
    def asked_of(self) -> AskedOf:
        return self._asked_of(token_sent=self._token is not None)

    async def prepare(self, deadline: float) -> float:
        """The token, once there is a connection. Raises TokenError, or UpstreamError if there is none by the
        deadline."""
        loop = asyncio.get_running_loop()
        await self._pool.of(self._origin).connected(deadline - loop.time())
        began = loop.time()
        self._token = await self._fetch()
        return loop.time() - began

    async def request(self, deadline: float) -> Stream:
        """Raises UpstreamError if it cannot be sent by the deadline."""
        left_s = deadline - asyncio.get_running_loop().time()
        return await self._pool.of(self._origin).open(self._headers(self._token), left_s)

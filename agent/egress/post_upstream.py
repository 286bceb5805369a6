"""Asking the front end before the gateway for a POST tunnel, with an ID token if it wants one."""

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


class PostUpstream(Upstream):
    """The front end at `origin`, asked for one tunnel."""

    def __init__(
        self,
        pool: Pool,
        origin: Origin,
        source: TokenSource,
        headers: Callable[[str | None], Headers],
        asked_of: Callable[[bool], AskedOf],
    ) -> None:
        """`headers(token)` are the request's; `asked_of(token_sent)` says what a refusal means."""
        self._pool = pool
        self._origin = origin
        self._source = source
        self._headers = headers
        self._asked_of = asked_of
        self._token: str | None = None
        self._rejected: str | None = None

    def __str__(self) -> str:
        return str(self._origin)

    @property
    def asked_of(self) -> AskedOf:
        return self._asked_of(self._token is not None)

    async def prepare(self, deadline: float) -> float:
        """The token. Raises TokenError."""
        self._token = await self._source.token()
        return 0.0

    async def request(self, deadline: float) -> Stream:
        """Raises DialError or UpstreamError if there is no connection by the deadline."""
        left_s = deadline - asyncio.get_running_loop().time()
        return await self._pool.of(self._origin).open(self._headers(self._token), left_s)

    def accepted(self) -> None:
        self._source.accepted()

    def reject_token(self) -> bool:
        if self._token is None or self._rejected is not None:
            return False
        self._rejected = self._token
        self._source.invalidate(self._token)
        return True

    async def renew_token(self) -> bool:
        self._token = await self._source.token()
        return self._token != self._rejected

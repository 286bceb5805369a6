"""Asking the gateway for a tunnel: a CONNECT on a pooled HTTP/2 connection with mTLS, as ztunnel asks
(HBONE).

Whether the target may be had, and what its name stands for, the gateway decides; krun never looks it up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.http2.events import Headers
from shared.net.dial import Origin
from shared.net.http2.answers import AskedOf
from shared.net.legs.stream import Stream
from shared.net.pool.pool import Pool
from shared.tunnel.opening import Upstream


class GatewayUpstream(Upstream):
    """The gateway at `origin`, asked for one tunnel with `headers`."""

    def __init__(
        self,
        pool: Pool,
        origin: Origin,
        headers: Headers,
        *,
        about_to_send: Callable[[], None],
        retried: Callable[[str], None],
    ) -> None:
        """`about_to_send()` is called before what goes with a request is sent; `retried(reason)` when it is
        asked once more."""
        self._pool = pool
        self._origin = origin
        self._headers = headers
        self._about_to_send = about_to_send
        self._retried = retried

    def __str__(self) -> str:
        return str(self._origin)

    @property
    def asked_of(self) -> AskedOf:
        return AskedOf(token_sent=False, in_mesh=True)

    def request_now(self) -> Stream | None:
        self._about_to_send()
        return self._pool.open_now(self._origin, self._headers)

    async def prepare(self, deadline: float) -> float:
        """There is nothing to be had but the connection, which `request` waits for."""
        return 0.0

    async def request(self, deadline: float) -> Stream:
        """Raises DialError or UpstreamError if there is no connection by the deadline."""
        left_s = deadline - asyncio.get_running_loop().time()
        stream = await self._pool.of(self._origin).open(self._headers, left_s)
        self._about_to_send()
        return stream

    def retrying(self, reason: str, *, over_budget: bool = False) -> None:
        if not over_budget:
            self._retried(reason)

"""The connections to an app that speaks HTTP/1.1: dialled with a deadline, and kept for the next exchange.

The idle connection that was used last is used first. An idle one is closed after `KEEP_S`, which is sooner
than the usual servers close it. So a request hardly ever meets a connection that is about to end; one that
does is sent again where that is safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from agent.proxy.exchange import Exchange, Waiting
from agent.proxy.http1_connection import Http1Connection
from shared.address import Address
from shared.errors import DialError
from shared.net.dial import dial
from shared.net.legs.contract import Leg

KEEP_S = 1.0
"""How long an idle connection is kept: gunicorn's threads close one after 2 s, Node and uvicorn after 5. A
new one costs 0.1 ms, so nothing is gained by more."""

MAX_IDLE = 64
"""Idle connections: each is a descriptor here and a thread in some apps."""


class Http1Pool:
    """Carries exchanges to the app at `app`. `upgraded` and `http2` as in `Http1Connection`."""

    def __init__(
        self,
        app: Address,
        dial_timeout_s: float,
        *,
        upgraded: Callable[[Exchange, Leg, bytes], None],
        http2: Callable[[], None],
    ) -> None:
        self._app = app
        self._dial_timeout_s = dial_timeout_s
        self._upgraded = upgraded
        self._http2 = http2
        self._connections: set[Http1Connection] = set()
        self._idle: dict[Http1Connection, None] = {}  # the one that was used last is the last
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    @property
    def leaving(self) -> list[Http1Connection]:
        """Those that hold bytes for an app that has answered, and not read its request to the end."""
        return [connection for connection in self._connections if connection.is_leaving]

    def carry(self, exchange: Exchange, *, fresh: bool = False) -> None:
        """Carries an exchange, on a connection of its own if `fresh`."""
        if self._idle and not fresh:
            connection, _ = self._idle.popitem()
            connection.carry(exchange)
        else:
            Waiting(exchange, self._carry_fresh(exchange), "dial the app")

    def close(self) -> None:
        """Closes all connections; what is under way is cut off."""
        self._is_closed = True
        for connection in list(self._connections):
            connection.close()
        if self._timer is not None:
            self._timer.cancel()

    async def _carry_fresh(self, exchange: Exchange) -> None:
        """Carries an exchange on a new connection."""
        try:
            leg = await dial(self._app, self._dial_timeout_s)
        except DialError as error:
            exchange.unreachable(error, self._app, self._app)
            return
        connection = Http1Connection(
            leg, free=self._free, gone=self._gone, upgraded=self._upgraded, http2=self._http2
        )
        if connection.is_usable:
            self._connections.add(connection)
            connection.carry(exchange)
        else:
            exchange.carrier = None
            exchange.fail(
                HTTPStatus.BAD_GATEWAY, "the app spoke before it was asked, so it does not speak HTTP/1.1"
            )

    def _free(self, connection: Http1Connection) -> None:
        if self._is_closed or len(self._idle) >= MAX_IDLE:
            connection.close()
            return
        connection.idle_since = self._loop.time()
        self._idle[connection] = None
        if self._timer is None:
            self._timer = self._loop.call_later(KEEP_S, self._check)

    def _gone(self, connection: Http1Connection) -> None:
        self._connections.discard(connection)
        self._idle.pop(connection, None)

    def _check(self) -> None:
        """Closes those that nobody has used for KEEP_S; they stand in that order."""
        now = self._loop.time()
        while self._idle:
            connection = next(iter(self._idle))
            left_s = connection.idle_since + KEEP_S - now
            if left_s > 0:
                self._timer = self._loop.call_later(left_s, self._check)
                return
            connection.close()
        self._timer = None

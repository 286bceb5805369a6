"""A service as a forward sees it: tunnels to all of its targets, on as few HTTP/2 connections as will do.

A token that has to be fetched is fetched once for many tunnels, and again when its end is near. When the
service cannot be reached, it is tried again after growing pauses until it can, so that a line says so.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from http import HTTPStatus
from typing import cast

from hbone import tunnel_end
from hbone.destination import CONNECT_TIMEOUT_S, Destination
from hbone.forward.renewed_token import RenewedToken, renewed
from hbone.forward.reports import Troubles
from hbone.stdio_tunnel import RESPONSE_TIMEOUT_S
from shared.backoff import doubled_s, half_or_more
from shared.errors import DialError, HboneError, StatusError, UpstreamError
from shared.http2.events import Headers
from shared.net.http2.answers import AskedOf, refusal
from shared.net.http2.connection import Connection
from shared.net.legs.contract import Leg
from shared.net.legs.stream import Stream
from shared.net.pool.pool import Pool
from shared.net.pool.pool_limits import PoolLimits
from shared.tasks import spawn
from shared.tunnel import tunnel_request
from shared.tunnel.opening import Opening
from shared.tunnel.pooled_upstream import PooledUpstream
from shared.tunnel.retry import RetryBudget, RetryRules

MANY_STREAMS = 1000
"""On one connection, if the far side allows as many: Cloud Run's front end allows 100."""

RETRIES = 3
"""Of a request for a tunnel, with pauses of 1.75 s at most together: an app that restarts is reached, and a
client is not kept waiting for one that is not there."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Between two attempts at something that fails."""


def pool_of(keepalive_s: float) -> Pool:
    """The connections of one command. A PING asks for a sign of life after `keepalive_s` seconds of silence,
    while tunnels are open; 0: never."""
    return Pool(
        limits=PoolLimits(
            connect_timeout_s=CONNECT_TIMEOUT_S,
            streams_per_connection=MANY_STREAMS,
            ping_interval_s=keepalive_s,
            ping_timeout_s=keepalive_s,
        )
    )


def pause_s(failures: int) -> float:
    """How long to wait after one more failure than `failures` in a row."""
    return half_or_more(doubled_s(FIRST_PAUSE_S, LONGEST_PAUSE_S, failures), random.random())


class Service:
    """One destination, whatever target in its container is meant."""

    def __init__(self, where: Destination, pool: Pool, troubles: Troubles) -> None:
        self.where = where
        self.pool = pool
        self.source = renewed(where.token)
        self.budget = RetryBudget()
        self._troubles = troubles
        self._recovering: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        target = self.where.target
        return f"{target.scheme}://{target.authority}"

    def target(self, name: str) -> ServiceTarget:
        """The target of `/_hbone/NAME`."""
        return ServiceTarget(self, name)

    def headers(self, path: str, token: str | None, method: bytes = b"POST") -> Headers:
        """Of a request for `path`."""
        target = self.where.target
        headers = tunnel_request.post(target.scheme, target.authority, path, token)
        headers[0] = (b":method", method)
        return headers

    async def open(self, path: str) -> Stream:
        """The stream of a tunnel. Raises HboneError."""
        upstream = PooledUpstream(
            self.pool, self.where.origin, self.source, partial(self.headers, path), name=str(self)
        )
        opening = Opening(upstream, RESPONSE_TIMEOUT_S, RetryRules(RETRIES), budget=self.budget)
        try:
            return await opening.run()
        except DialError:
            self.recover()
            raise

    async def connected(self) -> None:
        """Returns once there is a connection. Raises HboneError."""
        await self.pool.of(self.where.origin).connected(CONNECT_TIMEOUT_S)

    async def check(self, name: str) -> None:
        """Asks whether there is a target called `name`, without connecting it: krun answers a GET with 405.

        Raises:
            HboneError: there is none, or we may not have it, or there is no answer.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RESPONSE_TIMEOUT_S
        origin = self.pool.of(self.where.origin)
        await origin.connected(deadline - loop.time())
        token = await self.source.token()
        path = f"{tunnel_request.TUNNEL_PREFIX}{name}"
        headers = self.headers(path, token, b"GET")
        stream = await origin.open(headers, deadline - loop.time(), end_stream=True)
        try:
            status = await stream.response(deadline - loop.time())
        except BaseException:
            stream.abort()
            raise
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.source.accepted()
            stream.close()
            return
        error = await refusal(stream, status, AskedOf(token_sent=token is not None))
        if status == HTTPStatus.OK:
            error = StatusError(status, f"answered {status} to a GET, which krun does not: is krun there?")
        raise error

    def cause(self, error: HboneError, stream: Stream, age_s: float) -> str:
        """Why `stream` broke with `error`, `age_s` seconds after it was asked for."""
        connection = cast("Connection", stream.connection)
        known = tunnel_end.Connection.of(connection, self.where.target)
        if connection.lost:
            self.recover()
        return f"ended after {tunnel_end.age(age_s)}: {tunnel_end.cause(error, age_s, known)}"

    def close(self) -> None:
        """Tries nothing again."""
        if isinstance(self.source, RenewedToken):
            self.source.close()
        if self._recovering is not None:
            self._recovering.cancel()

    def recover(self) -> None:
        """Connects again, after growing pauses, until that works."""
        if self._recovering is None:
            self._troubles.lost(str(self))
            self._recovering = spawn(self._connect_again(), name=f"connect to {self} again")

    async def _connect_again(self) -> None:
        """Returns once there is a connection."""
        failures = 0
        try:
            while True:
                await asyncio.sleep(pause_s(failures))
                try:
                    await self.pool.of(self.where.origin).connected(CONNECT_TIMEOUT_S)
                except UpstreamError as error:
                    failures += 1
                    self._troubles.failed(str(self), str(error))
                else:
                    self._troubles.works(str(self))
                    return
        finally:
            self._recovering = None


class ServiceTarget:
    """One target of a service, as a way."""

    def __init__(self, service: Service, name: str) -> None:
        self._service = service
        self._name = name

    def __str__(self) -> str:
        return f"{self._name} of {self._service}"

    async def open(self) -> Stream:
        """The stream of a tunnel. Raises HboneError."""
        return await self._service.open(f"{tunnel_request.TUNNEL_PREFIX}{self._name}")

    async def check(self) -> None:
        """Raises HboneError, which names the target, if it cannot be had."""
        try:
            await self._service.check(self._name)
        except StatusError as error:
            raise StatusError(error.status, f"{self}: {error}") from error
        except DialError:
            raise  # it names the origin
        except UpstreamError as error:
            raise UpstreamError(f"{self}: {error}") from error

    def cause(self, error: HboneError, leg: Leg, age_s: float) -> str:
        """As `Way` has it."""
        return self._service.cause(error, cast("Stream", leg), age_s)

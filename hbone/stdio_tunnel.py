"""The tunnel of `hbone URL` on a connection to the service: asked for, carried, and why it ended."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from hbone.destination import CONNECT_TIMEOUT_S, Destination
from hbone.stdio import StdioLeg
from hbone.target import TunnelTarget
from shared.errors import (
    EXIT_OK,
    DialError,
    HboneError,
    StatusError,
    UpstreamError,
)
from shared.net.dial import dial_http2
from shared.net.early_connection import EarlyConnection
from shared.net.http2.answers import AskedOf
from shared.net.http2.connection import Connection
from shared.net.http2.liveness import while_connected
from shared.net.legs.stream import Stream
from shared.net.relay.relay import Relay
from shared.tunnel import tunnel_request
from shared.tunnel.opening import Opening, Upstream
from shared.tunnel.retry import RetryRules

if TYPE_CHECKING:
    from hbone.verbose import Hops

RESPONSE_TIMEOUT_S = 60.0
"""For the response, however often it takes to ask for it: a service that has scaled to zero starts first."""

CLOSE_TIMEOUT_S = 20.0
"""How long a far side that has finished may take for our last bytes and its own close; less than the 30 s
after which the event loop gives up on a TLS connection without a word."""


async def carry(
    where: Destination,
    token: str | None,
    dialling: asyncio.Task[EarlyConnection] | None,
    input_fd: int,
    keepalive_s: float,
    hops: Hops | None,
) -> int:
    """Carries `input_fd` and standard output through a tunnel to `where` until both directions have ended.
    The first request has `token` and goes by the connection of `dialling`, if that is there. Returns the exit
    code.

    Raises:
        HboneError: the tunnel could not be opened, or broke.
    """
    leg = StdioLeg(input_fd) if hops is None else hops.told_leg(input_fd)
    service = _Service(where, token, dialling, leg, keepalive_s, hops)
    try:
        stream = await service.opened()
        if hops is not None:
            hops.answered(where, service.connection.certificate_ends)
        tunnel = _Tunnel(where.target, service.connection, stream, service.asked_at)
        leg.drop_first(service.first_flight_bytes)
        return await tunnel.carry(leg)
    finally:
        leg.abort()
        service.close()


class _Service(Upstream):
    """The service, asked for a tunnel on a new connection each time, as the old one may be on its way out.
    ssh's identification goes with the request. A 401 is final for its token."""

    def __init__(
        self,
        where: Destination,
        token: str | None,
        dialling: asyncio.Task[EarlyConnection] | None,
        leg: StdioLeg,
        keepalive_s: float,
        hops: Hops | None,
    ) -> None:
        self._where = where
        self._token = token
        self._dialling = dialling
        self._leg = leg
        self.first_flight_bytes = 0
        """How much of the input was sent with the last request."""
        self.asked_at = 0.0
        """When the request was sent last, by the loop's clock."""
        self._connection: _Connection | None = None
        self._keepalive_s = keepalive_s
        self._hops = hops

    def __str__(self) -> str:
        return str(self._where.origin)

    @property
    def asked_of(self) -> AskedOf:
        return AskedOf(token_sent=self._token is not None)

    @property
    def connection(self) -> _Connection:
        """The last one, once there was one."""
        assert self._connection is not None
        return self._connection

    async def opened(self) -> Stream:
        """The stream of a tunnel. A token that was kept from before may have been revoked: if it is refused,
        a new one is sent once. Raises HboneError."""
        where, hops = self._where, self._hops
        try:
            return await self._asked()
        except StatusError as error:
            if error.status != 401 or not where.token_was_kept:
                raise
        self.close()
        if hops is not None:
            hops("answer", "401: the kept token is refused, a new one is sent")
        where.token.invalidate(self._token)
        self._token = await where.token.token()
        if hops is not None:
            hops.has_token(where, self._token)
        return await self._asked()

    async def _asked(self) -> Stream:
        try:
            return await Opening(self, RESPONSE_TIMEOUT_S, RetryRules()).run()
        except DialError:
            raise
        except StatusError as error:
            raise StatusError(error.status, f"{self._where.target}: {error}") from error
        except UpstreamError as error:
            raise _explained(self._where.target, self.connection, error) from error

    async def prepare(self, deadline: float) -> float:
        """Raises DialError."""
        self._close_connection()
        dialling, self._dialling = self._dialling, None
        if dialling is not None:
            early = await dialling
        else:
            origin = self._where.origin
            early = await dial_http2(origin, CONNECT_TIMEOUT_S, EarlyConnection, told=self._hops)
        made = None if early.lost else early.hand_over(_Connection(self._keepalive_s))
        if made is None or made.lost:
            raise DialError(f"connect to {self}: it ended the connection at once; does it take HTTP/2?")
        self._connection = made
        return 0.0

    async def request(self, deadline: float) -> Stream:
        self.asked_at = asyncio.get_running_loop().time()
        target = self._where.target
        request = tunnel_request.post(target.scheme, target.authority, target.path, self._token)
        stream = self.connection.open(request)
        first_flight = self._leg.first_flight()
        self.first_flight_bytes = len(first_flight)
        if first_flight:
            stream.write(first_flight)
        if self._hops is not None:
            self._hops("HTTP/2", f"the request is sent, with {len(first_flight)} bytes of the input")
        return stream

    def retrying(self, reason: str, *, over_budget: bool = False) -> None:
        if self._hops is not None and not over_budget:
            self._hops("answer", f"{reason}: it is asked once more")

    def release(self, stream: Stream) -> None:
        stream.close()
        self.close()

    def close(self) -> None:
        """Closes the connection, if there is one, and ends the dial that nobody waits for."""
        self._close_connection()
        dialling, self._dialling = self._dialling, None
        if dialling is not None and not dialling.cancel() and not dialling.exception():
            dialling.result().abort("not needed")

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _Connection(Connection):
    """A connection to the target's origin."""

    def __init__(self, keepalive_s: float) -> None:
        self.gone = asyncio.Event()
        """Set once it is over, with all that was written to it."""
        super().__init__(
            client=True, keepalive=while_connected(keepalive_s), on_lost=lambda _: self.gone.set()
        )


def _explained(
    target: TunnelTarget, connection: _Connection, error: HboneError, age_s: float | None = None
) -> UpstreamError:
    """Why the tunnel ended with `error` at the age of `age_s` seconds, or, without one, was not opened."""
    from hbone import tunnel_end  # most tunnels end in order, and ssh users wait for what is imported

    known = tunnel_end.Connection.of(connection, target)
    how = "not opened" if age_s is None else f"ended after {tunnel_end.age(age_s)}"
    return UpstreamError(f"{target}: {how}: {tunnel_end.cause(error, age_s or 0.0, known)}")


class _Tunnel:
    """An open tunnel: standard input and output on one side, the stream on the other."""

    def __init__(
        self, target: TunnelTarget, connection: _Connection, stream: Stream, asked_at: float
    ) -> None:
        self._target = target
        self._connection = connection
        self._stream = stream
        self._asked_at = asked_at

    async def carry(self, leg: StdioLeg) -> int:
        """Returns the exit code when both directions have ended.

        Raises:
            HboneError: one of them broke.
        """
        try:
            await self._relay(leg)
            await self._finish(leg)
        except HboneError:
            if leg.abandoned:
                return 128 + signal.SIGPIPE
            raise
        return EXIT_OK

    async def _relay(self, leg: StdioLeg) -> None:
        """Returns when both directions have ended. Raises what broke one of them."""
        over = asyncio.Event()
        relay = Relay(leg, self._stream, lambda _: over.set())
        relay.start()
        try:
            await over.wait()
        finally:
            relay.abort(UpstreamError("interrupted"))
        if relay.error is not None and relay.broken is leg:
            raise relay.error
        if relay.error is not None:
            raise self._ended(relay.error) from relay.error

    async def _finish(self, leg: StdioLeg) -> None:
        """Both directions have ended, but their last bytes may still be on their way out, and would end with
        the process.

        Raises:
            UpstreamError: they were not taken.
        """
        connection = self._connection
        connection.drain()
        await leg.flushed()
        if leg.error is not None:
            raise leg.error
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await connection.gone.wait()
        except TimeoutError as error:
            text = f"the last bytes were not taken within {CLOSE_TIMEOUT_S:g} s"
            raise self._ended(UpstreamError(text)) from error
        if connection.unanswered_s:
            raise self._ended(UpstreamError(connection.cause))

    def _ended(self, error: HboneError) -> UpstreamError:
        age_s = asyncio.get_running_loop().time() - self._asked_at
        return _explained(self._target, self._connection, error, age_s)

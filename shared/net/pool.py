"""HTTP/2 connections to origins, each shared by many tunnels.

One dialler per origin at a time, and whoever needs a stream meanwhile waits for it; another origin's dial is
never in the way. A connection that said GOAWAY or broke is let go of; its streams end by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.errors import DialError, UpstreamError
from shared.net.connection import Connection
from shared.net.dial import Origin, dial_http2
from shared.net.stream import Stream
from shared.tasks import spawn
from shared.wire.events import Headers
from shared.wire.session import SessionLimits

CONNECTIONS_PER_ORIGIN = 64
"""With 100 streams each, 6,400 tunnels to one service: six times what one instance of it takes."""

IDLE_S = 300.0
"""How long a connection without streams is kept: ztunnel's pool keeps as long."""


class OriginPool:
    """The connections to one origin."""

    def __init__(
        self,
        origin: Origin,
        *,
        connect_timeout_s: float,
        streams_per_connection: int,
        limits: SessionLimits | None = None,
        opened: Callable[[Origin], None],
        closed: Callable[[Origin], None],
        unused: Callable[[Origin], None],
    ) -> None:
        self.origin = origin
        self.connections: list[Connection] = []
        self._connect_timeout_s = connect_timeout_s
        self._streams_per_connection = streams_per_connection
        self._limits = limits
        self._dialling: asyncio.Task[None] | None = None
        self._room_waiters: set[asyncio.Future[None]] = set()
        self._openers = 0  # calls of `open` that have not returned
        self._is_closed = False
        self._idle: dict[Connection, asyncio.TimerHandle] = {}
        self._opened = opened
        self._closed = closed
        self._unused = unused

    @property
    def unused(self) -> bool:
        """No connection, none on its way, and nobody who would dial one."""
        return not (self.connections or self._dialling is not None or self._openers)

    def open_now(self, headers: Headers) -> Stream | None:
        """A new stream on a connection that has room, or None."""
        for connection in self.connections:
            if connection.room > 0 and connection.open_streams < self._streams_per_connection:
                timer = self._idle.pop(connection, None)
                if timer is not None:
                    timer.cancel()
                return connection.open(headers)
        return None

    async def open(self, headers: Headers, timeout_s: float) -> Stream:
        """A new stream with these request headers; dials, or waits for room, when it must.

        Raises:
            DialError: no connection could be made.
            UpstreamError: after `timeout_s` seconds there is no connection, or all are full.
        """
        stream = self.open_now(headers)
        if stream is not None:
            return stream
        self._openers += 1
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await self._more_room()
                    stream = self.open_now(headers)
                    if stream is not None:
                        return stream
        except TimeoutError as error:
            count = len(self.connections)
            what = f"no free stream on {count} connections" if count else "not connected"
            raise UpstreamError(f"{self.origin}: {what} within {timeout_s:g} s") from error
        finally:
            self._openers -= 1
            self._tell_if_unused()

    def close(self) -> None:
        """Drops all connections; whoever waits for one gets DialError."""
        self._is_closed = True
        if self._dialling is not None:
            self._dialling.cancel()
        self._wake_waiters()
        for connection in list(self.connections):
            connection.close()

    async def _more_room(self) -> None:
        if self._is_closed:
            raise DialError(f"connect to {self.origin}: we are stopping")
        if self._dialling is None and len(self.connections) < CONNECTIONS_PER_ORIGIN:
            self._dialling = spawn(self._dial(), name=f"dial {self.origin}")
            self._dialling.add_done_callback(self._dialled)
        dialling = self._dialling
        if dialling is not None:
            # Not awaited itself: a waiter whose time is up must not take the connection from the others.
            await asyncio.wait((dialling,))
            if not dialling.cancelled():
                dialling.result()
                if not self.connections:  # lost between the dialler's last step and this one
                    raise self._ended_at_once()
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._room_waiters.add(waiter)
        try:
            await waiter
        finally:
            self._room_waiters.discard(waiter)

    async def _dial(self) -> None:
        connection = await dial_http2(
            self.origin,
            self._connect_timeout_s,
            lambda: Connection(client=True, limits=self._limits, on_change=self._changed, on_lost=self._lost),
        )
        if not connection.usable:
            raise self._ended_at_once()
        self.connections.append(connection)
        self._opened(self.origin)
        self._changed()  # nobody may be left who wants it

    def _ended_at_once(self) -> DialError:
        """To the waiters this is a failure like any other: they would only dial again, and again."""
        return DialError(f"connect to {self.origin}: the peer ended the connection at once")

    def _dialled(self, task: asyncio.Task[None]) -> None:
        self._dialling = None
        self._tell_if_unused()

    def _tell_if_unused(self) -> None:
        if self.unused:
            self._unused(self.origin)

    def _wake_waiters(self) -> None:
        for waiter in self._room_waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _changed(self) -> None:
        """Streams ended, or a peer's limit changed: someone may have room, some connection may be idle."""
        self._wake_waiters()
        for connection in list(self.connections):
            if not connection.usable:
                self._drop(connection)
            elif not connection.open_streams and connection not in self._idle:
                loop = asyncio.get_running_loop()
                self._idle[connection] = loop.call_later(IDLE_S, self._idle_over, connection)

    def _idle_over(self, connection: Connection) -> None:
        self._drop(connection)
        connection.close()

    def _lost(self, connection: Connection) -> None:
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        timer = self._idle.pop(connection, None)
        if timer is not None:
            timer.cancel()
        if connection in self.connections:
            self.connections.remove(connection)
            self._closed(self.origin)
            self._tell_if_unused()


class Pool:
    """The connections to all origins. `opened` and `closed` are told about each connection."""

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        streams_per_connection: int,
        limits: SessionLimits | None = None,
        opened: Callable[[Origin], None] = lambda origin: None,
        closed: Callable[[Origin], None] = lambda origin: None,
    ) -> None:
        self.origins: dict[Origin, OriginPool] = {}
        """Those with a connection, or with one on its way."""
        self._connect_timeout_s = connect_timeout_s
        self._streams_per_connection = streams_per_connection
        self._limits = limits
        self._opened = opened
        self._closed = closed

    @property
    def buffered_bytes(self) -> int:
        """What waits on all connections to be sent."""
        return sum(
            connection.buffered_bytes for origin in self.origins.values() for connection in origin.connections
        )

    def of(self, origin: Origin) -> OriginPool:
        """The pool of one origin."""
        pool = self.origins.get(origin)
        if pool is None:
            pool = self.origins[origin] = OriginPool(
                origin,
                connect_timeout_s=self._connect_timeout_s,
                streams_per_connection=self._streams_per_connection,
                limits=self._limits,
                opened=self._opened,
                closed=self._closed,
                unused=self._forget,
            )
        return pool

    def close(self) -> None:
        """Drops all connections."""
        for pool in list(self.origins.values()):
            pool.close()

    def _forget(self, origin: Origin) -> None:
        self.origins.pop(origin, None)  # names of services long gone must not pile up

"""krun's tunnel port: which connections are accepted, and which are ended for new ones.

If as many connections are open as may be, an unused one is ended for a new one: the oldest that has not said
what it speaks, else the one that has been without a stream for longest. Otherwise a client that opens
connections and leaves them alone would keep all others out. A new one is refused if all are in use, if too
much is held for all peers, or if too many are ending.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shared.address import Address
from shared.errors import LimitError
from shared.http2.flood_guard import FloodLimits
from shared.http2.session import SessionLimits
from shared.listen import bound_address, listen
from shared.net.http2.connection import Connection
from shared.net.http2.first_bytes import FirstBytes, http1_answer
from shared.net.legs.stream import Stream
from shared.net.legs.tcp import Surplus
from shared.ops.repeated_log import RepeatedLog

log = logging.getLogger("hbone.agent")

LIMITS = SessionLimits(floods=FloodLimits(front_end=True), extended_connect=True)
"""Cloud Run's front end carries the requests of many clients on one connection, WebSockets among them."""

H2C_ONLY = (
    "it accepts HTTP/2 without TLS (h2c) only: deploy the service with --use-http2, or name its port h2c "
    "(ports: [{name: h2c, containerPort: ...}])"
)

_HTTP1_ANSWER = http1_answer(
    f"krun, the port of the tunnels: {H2C_ONLY}. "
    "From a command line: curl --http2-prior-knowledge, without https."
)

EVICT_AFTER_S = 1.0
"""A connection has as long to say something, or to open a stream, before it can be made to leave."""

MOST_LEAVING = 16
"""Connections that have been made to leave and have not yet: GOAWAY lets what is on its way arrive."""


class TunnelPort:
    """Made by the agent. `request(stream)` gets every request; `opened(connection)` and `lost(connection)`
    are called once each for every connection; `turned_away(peer, error)` for each that is one too many."""

    def __init__(
        self,
        *,
        most_connections: int,
        idle_timeout_s: float | None,
        request: Callable[[Stream], None],
        opened: Callable[[Connection], None],
        lost: Callable[[Connection], None],
        turned_away: Callable[[str, LimitError], None],
        refusal: Callable[[], LimitError | None] = lambda: None,
    ) -> None:
        """`refusal()` says why no connection is accepted now, if so."""
        self._most = most_connections
        self._idle_timeout_s = idle_timeout_s
        self._request = request
        self._told_opened = opened
        self._told_lost = lost
        self._turned_away = turned_away
        self._refusal = refusal
        self._arriving: dict[FirstBytes, float] = {}  # in the order of their accept, with its time
        self._connections: set[Connection] = set()
        self._leaving: set[Connection] = set()
        self._draining = False
        self._listener: asyncio.Server | None = None
        self._warnings = RepeatedLog(log)

    async def open(self, address: Address) -> Address:
        """Listens; returns where. Raises UnavailableError."""
        self._listener = await listen(address, self._accept, purpose="tunnels")
        return bound_address(self._listener)

    async def drain(self) -> None:
        """Accepts no further connection, but for those that the kernel has accepted. Those that have not yet
        said what they speak count as connections from now on: whoever drains those drains them, too.
        """
        from shared.net.listen_close import close_listening

        self._draining = True
        if self._listener is not None:
            await close_listening([self._listener], self._accept)
        for arriving in list(self._arriving):
            arriving.serve()

    def close(self) -> None:
        """Accepts no further connection, and ends those that have not yet said what they speak."""
        if self._listener is not None:
            self._listener.close()
        for arriving in list(self._arriving):
            arriving.abort()
        self._warnings.close()

    def _accept(self) -> asyncio.BaseProtocol:
        if self._draining:  # it waited to be accepted
            connection = self._connection()
            connection.drain()
            return connection
        refusal = self._refusal()
        if (
            refusal is None
            and len(self._connections) + len(self._arriving) >= self._most
            and not self._evict()
        ):
            text = f"{self._most} connections are open, which is HBONE_MAX_CONNECTIONS"
            refusal = LimitError(text, "HBONE_MAX_CONNECTIONS")
        if refusal is not None:
            error = refusal
            return Surplus(lambda peer: self._turned_away(peer, error))
        arriving = FirstBytes(
            connection=self._connection, answer=_HTTP1_ANSWER, http1=self._http1, decided=self._decided
        )
        self._arriving[arriving] = asyncio.get_running_loop().time()
        return arriving

    def _evict(self) -> bool:
        """Makes one leave that is in nobody's way; False if there is none."""
        before = asyncio.get_running_loop().time() - EVICT_AFTER_S
        for arriving, since in self._arriving.items():
            if since > before:
                break  # and so are all behind it
            arriving.abort()
            self._arriving.pop(arriving, None)
            self._told_evicted("one that has said nothing")
            return True
        if len(self._leaving) >= MOST_LEAVING:
            return False
        longest: tuple[float, Connection] | None = None
        for connection in self._connections - self._leaving:
            idle_since = connection.idle_since
            if idle_since is not None and idle_since <= (longest[0] if longest else before):
                longest = idle_since, connection
        if longest is None:
            return False
        idle_since, connection = longest
        idle_s = before + EVICT_AFTER_S - idle_since
        self._leaving.add(connection)
        self._told_evicted(f"{connection.peer_name}, without a stream for {idle_s:.0f} s,")
        connection.drain()
        return True

    def _told_evicted(self, who: str) -> None:
        text = (
            f"{self._most} connections are open, which is HBONE_MAX_CONNECTIONS: {who} is ended for a new one"
        )
        self._warnings.warning("evicted", text)

    def _decided(self, arriving: FirstBytes) -> None:
        self._arriving.pop(arriving, None)

    def _connection(self) -> Connection:
        connection = Connection(
            client=False,
            limits=LIMITS,
            on_request=self._request,
            on_lost=self._lost,
            idle_timeout_s=self._idle_timeout_s,
        )
        self._connections.add(connection)
        self._told_opened(connection)
        return connection

    def _lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._leaving.discard(connection)
        self._told_lost(connection)

    def _http1(self, peer: str) -> None:
        self._warnings.warning("http1", f"HTTP/1.1 from {peer} on the tunnel port: {H2C_ONLY}")

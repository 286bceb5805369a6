"""Who may come in: how many connections there may be, of one address and on one route as well.

Owned here: the counts, their bounds, and the refusals by limit as metrics. That a refused client is told, and
its line in the log, are the caller's: before the hello RST, after it a TLS alert.

An address, and a route, is in a table only while it has a connection, so neither table is ever longer than
`max_connections`. An address is counted as it stands in the connection: behind a load balancer or a node's
NAT many clients have the same one, which is why there is no bound on it unless the file has one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, cast

from shared.address import client_network
from shared.errors import LimitError
from shared.net.legs.read_buffer import READ_BUFFER
from shared.net.names import resolver
from shared.ops import families
from shared.ops.metrics import MAX_LABELS

if TYPE_CHECKING:
    from prometheus_client import Metric

    from gateway.config.limit_settings import Limits
    from gateway.rules.routes import Route

CONNECTIONS = "max_connections"
PER_SOURCE = "max_connections_per_source"
PER_ROUTE = "max_connections_per_route"
BUFFERED = "max_buffered"
HBONE_CONNECTIONS = "hbone.max_connections"
HBONE_PER_SOURCE = "hbone.max_connections_per_source"
HBONE_TUNNELS = "hbone.max_tunnels"
HBONE_PER_IDENTITY = "hbone.max_tunnels_per_identity"
REVERSE_CONNECTIONS = "reverse.max_connections"
REVERSE_NAMES = "reverse.max_names"
REVERSE_PER_NAME = "reverse.max_connections_per_name"
LOOKUPS = resolver.LIMIT
LOOKUPS_PER_CLIENT = resolver.LIMIT_PER_CLIENT
NEW_AUDIENCES = "max_new_audiences"
NEW_AUDIENCES_PER_SOURCE = "max_new_audiences_per_source"
DESCRIPTORS = "descriptors"
"""Not in the file: the process may open no more files."""

LIMITS = (
    CONNECTIONS,
    PER_SOURCE,
    PER_ROUTE,
    BUFFERED,
    HBONE_CONNECTIONS,
    HBONE_PER_SOURCE,
    HBONE_TUNNELS,
    HBONE_PER_IDENTITY,
    REVERSE_CONNECTIONS,
    REVERSE_NAMES,
    REVERSE_PER_NAME,
    LOOKUPS,
    LOOKUPS_PER_CLIENT,
    NEW_AUDIENCES,
    NEW_AUDIENCES_PER_SOURCE,
    DESCRIPTORS,
)
"""Every name that a LimitError of the gateway can have: the values of the metric's label."""


class Tally:
    """Counts by name; a name that has none is forgotten."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, name: str) -> None:
        """One more."""
        self.counts[name] = self.counts.get(name, 0) + 1

    def take(self, name: str) -> None:
        """One less."""
        left = self.counts.get(name, 0) - 1
        if left > 0:
            self.counts[name] = left
        else:
            self.counts.pop(name, None)

    def of(self, name: str) -> int:
        """How many there are."""
        return self.counts.get(name, 0)

    @property
    def most(self) -> int:
        """Of the name that has most."""
        return max(self.counts.values(), default=0)


class Refusals:
    """How often each limit refused somebody."""

    def __init__(self) -> None:
        self._by_limit = dict.fromkeys(LIMITS, 0)

    def add(self, error: LimitError) -> None:
        """Somebody was refused."""
        self._by_limit[error.limit] += 1

    def families(self) -> Iterator[Metric]:
        """The metric about it."""
        yield families.LIMIT_REFUSALS.metric(self._by_limit.items())


class Admission:
    """Lets connections in. Each `enter` that returns is followed by one `leave`, and so with routes."""

    def __init__(
        self,
        limits: Limits,
        *,
        share: Callable[[int], int] = lambda total: total,
        open_connections: Callable[[], int],
        is_full: Callable[[], bool] = lambda: False,
    ) -> None:
        """Of `limits` this process has its `share`; `is_full` says whether the memory for buffers is used
        up."""
        self.sources = Tally()
        self.routes = Tally()
        self.refusals = Refusals()
        self._limits = limits
        self._share = share
        self._open_connections = open_connections
        self._is_full = is_full

    def use_limits(self, limits: Limits) -> None:
        """Goes by `limits` from now on."""
        self._limits = limits

    @property
    def most_connections(self) -> int:
        """How many this process takes."""
        return self._share(self._limits.max_connections)

    @property
    def most_per_source(self) -> int:
        """How many of them from one address."""
        limits = self._limits
        return self._share(limits.max_connections_per_source or limits.max_connections)

    def most_per_route(self, route: Route) -> int:
        """How many of them on `route`."""
        limits = self._limits
        own = limits.max_connections_per_route if route.max_connections is None else route.max_connections
        return self._share(own or limits.max_connections)

    def route_families(self, routes: Iterable[Route]) -> Iterator[Metric]:
        """The connections of each route, and how many it may have, as metrics."""
        shown = list(itertools.islice(routes, MAX_LABELS))
        yield families.ROUTE_CONNECTIONS.metric((route.host, self.routes.of(route.host)) for route in shown)
        yield families.ROUTE_CONNECTIONS_LIMIT.metric(
            (route.host, self.most_per_route(route)) for route in shown
        )

    def enter(self, peer: str) -> None:
        """A connection from `peer`, its address as HOST:PORT, has come. Raises LimitError."""
        most = self.most_connections
        if self._open_connections() >= most:
            raise LimitError(f"{most} connections are open, which is {CONNECTIONS}", CONNECTIONS)
        if self._is_full():
            raise LimitError(f"open tunnels hold as many bytes as {BUFFERED} allows", BUFFERED)
        source, most = source_of(peer), self.most_per_source
        if self.sources.of(source) >= most:
            text = f"{most} connections from {source} are open, which is {PER_SOURCE}"
            raise LimitError(text, PER_SOURCE)
        self.sources.add(source)

    def leave(self, peer: str) -> None:
        """It is gone."""
        self.sources.take(source_of(peer))

    def enter_route(self, route: Route) -> None:
        """A connection's name has led to `route`. Raises LimitError."""
        most = self.most_per_route(route)
        if self.routes.of(route.host) >= most:
            which = PER_ROUTE if route.max_connections is None else "the route's max_connections"
            text = f"{most} connections on route {route.host} are open, which is {which}"
            raise LimitError(text, PER_ROUTE)
        self.routes.add(route.host)

    def leave_route(self, host: str) -> None:
        """A connection on the route with the glob `host` is gone."""
        self.routes.take(host)


class Doorstep(asyncio.BufferedProtocol):
    """Hands an accepted transport on before anything is read from it, which is the first moment that tells
    from where it came. A BufferedProtocol, for uvloop's transports hold on to the last protocol that is none:
    each tunnel would keep its doorstep, 0.2 KiB."""

    __slots__ = ("_accepted",)

    def __init__(self, accepted: Callable[[asyncio.Transport], None]) -> None:
        self._accepted = accepted

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._accepted(cast("asyncio.Transport", transport))

    def get_buffer(self, sizehint: int) -> memoryview:
        return READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """Nobody took the connection, and it is on its way out."""


def source_of(peer: str) -> str:
    """The address without its port."""
    return peer.rpartition(":")[0]


def network_of(peer: str) -> str:
    """What counts as one client (`client_network`) of `peer`, HOST:PORT. Never the empty text, which means us
    (`names.OURS`)."""
    return client_network(source_of(peer).strip("[]")) or peer or "unknown"

"""How many connections there may be: in all, from one address and on one route; and what each limit refused.

An address, or a route, is in a table only while it has a connection, so neither table is ever longer than
`max_connections`. Behind a load balancer or a node's NAT many clients have the same address: therefore there
is no bound on one unless the file has it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, cast

from gateway.ports.recent_refusals import RecentRefusals
from shared.address import client_network
from shared.errors import EmptyConnectionError, HboneError, LimitError
from shared.net.legs.read_buffer import READ_BUFFER
from shared.net.names import resolver
from shared.ops import families
from shared.ops.metrics import MAX_LABELS

if TYPE_CHECKING:
    from prometheus_client import Metric

    from gateway.config.limit_settings import Limits
    from gateway.rules.routes import Route
    from shared.ops.access_log import AccessLog
    from shared.ops.metrics import TunnelMetrics
    from shared.tunnel.tunnel_record import TunnelRecord

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


class Counts(dict[str, int]):
    """Numbers by name; a name that has none is not in it, and reads as 0."""

    def __missing__(self, name: str) -> int:
        return 0

    def add(self, name: str) -> None:
        """One more."""
        self[name] += 1

    def drop(self, name: str) -> None:
        """One less."""
        left = self[name] - 1
        if left > 0:
            self[name] = left
        else:
            self.pop(name, None)

    @property
    def largest(self) -> int:
        """Of the name that has most."""
        return max(self.values(), default=0)


class Refusals:
    """How often each limit refused somebody, and who was refused lately, for whatever reason."""

    def __init__(self) -> None:
        self.recent = RecentRefusals()
        self._by_limit = dict.fromkeys(LIMITS, 0)

    def add(self, error: LimitError) -> None:
        """Somebody was refused."""
        self._by_limit[error.limit] += 1

    def families(self) -> Iterator[Metric]:
        """The metric about it."""
        yield families.LIMIT_REFUSALS.metric(self._by_limit.items())


def report_refusal(
    record: TunnelRecord,
    error: HboneError,
    duration_s: float | None = None,
    *,
    access_log: AccessLog,
    metrics: TunnelMetrics,
    refusals: Refusals,
) -> None:
    """Counts a connection or request that was refused for `error` after `duration_s` seconds, and writes its
    line. A connection that ended without a byte has none."""
    metrics.refused(error.flag)
    if isinstance(error, LimitError):
        refusals.add(error)
    if not isinstance(error, EmptyConnectionError):
        record.fail(error, duration_s)
        refusals.recent.add(record)
        record.write(access_log)


def memory_full() -> LimitError:
    """Why nobody is let in while the memory for buffers is used up."""
    return LimitError(f"open tunnels hold as many bytes as {BUFFERED} allows", BUFFERED)


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
        self.sources = Counts()
        self.routes = Counts()
        self.opening = Counts()
        """Of those, tunnels that are not open yet."""
        self.starting = Counts()
        """Of these, tunnels that wait for their service to start."""
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
        """How many this process accepts."""
        return self._share(self._limits.max_connections)

    @property
    def most_per_source(self) -> int:
        """How many of them from one address."""
        limits = self._limits
        return self._share(limits.max_connections_per_source or limits.max_connections)

    @property
    def most_starting(self) -> int:
        """How many may wait for one service to start; never all places of this process."""
        return min(self._share(self._limits.max_cold_starts), self.most_starting_together)

    @property
    def most_starting_together(self) -> int:
        """How many may wait for services to start, all of them together."""
        return self._share(max(1, self._limits.max_connections // 2))

    def most_per_route(self, route: Route) -> int:
        """How many of them on `route`."""
        limits = self._limits
        own = limits.max_connections_per_route if route.max_connections is None else route.max_connections
        return self._share(own or limits.max_connections)

    def route_families(self, routes: Iterable[Route]) -> Iterator[Metric]:
        """The connections of each route, how many it may have, and how many wait for what, as metrics."""
        shown = list(itertools.islice(routes, MAX_LABELS))
        yield families.ROUTE_CONNECTIONS.metric((route.name, self.routes[route.name]) for route in shown)
        yield families.ROUTE_CONNECTIONS_LIMIT.metric(
            (route.name, self.most_per_route(route)) for route in shown
        )
        yield families.TUNNELS_OPENING.metric((route.name, self.opening[route.name]) for route in shown)
        yield families.TUNNELS_STARTING.metric((route.name, self.starting[route.name]) for route in shown)

    def enter(self, peer: str) -> None:
        """A connection from `peer`, its address as HOST:PORT, has come. Raises LimitError."""
        most = self.most_connections
        if self._open_connections() >= most:
            raise LimitError(f"{most} connections are open, which is {CONNECTIONS}", CONNECTIONS)
        if self._is_full():
            raise memory_full()
        source, most = source_of(peer), self.most_per_source
        if self.sources[source] >= most:
            text = f"{most} connections from {source} are open, which is {PER_SOURCE}"
            raise LimitError(text, PER_SOURCE)
        self.sources[source] += 1

    def leave(self, peer: str) -> None:
        """It is gone."""
        self.sources.drop(source_of(peer))

    def enter_route(self, route: Route) -> None:
        """A connection's name has led to `route`. Raises LimitError."""
        most = self.most_per_route(route)
        if self.routes[route.name] >= most:
            which = PER_ROUTE if route.max_connections is None else "the route's max_connections"
            text = f"{most} connections on route {route.name} are open, which is {which}"
            raise LimitError(text, PER_ROUTE)
        self.routes[route.name] += 1

    def leave_route(self, name: str) -> None:
        """A connection on the route with this name is gone."""
        self.routes.drop(name)


class AcceptProtocol(asyncio.BufferedProtocol):
    """Calls `accepted(transport)` before anything is read, which is the first moment that tells where a
    connection comes from. A BufferedProtocol, because uvloop's transports keep a reference to the last
    protocol that is none: 0.2 KiB for each tunnel."""

    __slots__ = ("_accepted",)

    def __init__(self, accepted: Callable[[asyncio.Transport], None]) -> None:
        self._accepted = accepted

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._accepted(cast("asyncio.Transport", transport))

    def get_buffer(self, sizehint: int) -> memoryview:
        return READ_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """The connection is being closed."""


def source_of(peer: str) -> str:
    """The address without its port."""
    return peer.rpartition(":")[0]


def network_of(peer: str) -> str:
    """What counts as one client (`client_network`) of `peer`, HOST:PORT. Never the empty text, which means us
    (`names.OURS`)."""
    return client_network(source_of(peer).strip("[]")) or peer or "unknown"

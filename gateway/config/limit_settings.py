"""What `limits:` in the gateway's file can set: bounds of time, number and memory.

Owned here: the fields of that mapping, their defaults and bounds. The rest of the file is `config.py`'s. What
a limit does is told where it is kept, for which ARCHITECTURE.md has a table.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from gateway.config.hbone_settings import or_off
from gateway.config.yaml_nodes import Value
from shared.http2.session import SessionLimits
from shared.net.names.resolver import MAX_LOOKUPS, MAX_LOOKUPS_PER_CLIENT
from shared.net.pool.pool_limits import CONNECTION_WINDOW_BYTES, PoolLimits
from shared.net.relay.relay import HALF_CLOSED_TIMEOUT_S

MAX_TIMEOUT_S = 3600.0
"""The longest time that makes sense: Cloud Run ends any request after an hour."""

MIN_TIMEOUT_S = 0.001
"""A time limit of zero would refuse everything; only a drain may be instant."""

MAX_CONNECTIONS = 1_000_000
"""More than the ports and file descriptors of one machine serve: a slip of the finger."""

MAX_NEW_AUDIENCES = 1_000_000
"""More than any service of tokens gives: a slip of the finger."""

MAX_PIPES = 10_000
"""Some 10 GiB that the kernel may have to keep for slow readers."""

MAX_STREAMS = 10_000
"""The same for the streams of one connection: one lost packet would hold up all of them."""

LEAST_WINDOW_BYTES = 65535
"""RFC 9113 section 6.9.2: a peer may send as much before it has seen our SETTINGS."""

MAX_WINDOW_BYTES = (1 << 31) - 1
"""RFC 9113 section 6.9.1."""

LEAST_BUFFERED_BYTES = 1 << 20
"""Less would be used up by the first tunnel whose client reads slowly."""

MAX_BUFFERED_BYTES = 1 << 50
"""More than any machine has."""

MAX_RETRIES = 20
"""After 20 pauses a minute has gone by on average: more is no patience, but a loop."""

MOST_LOOKUPS = 10_000
"""More than a name server takes, and two sockets each."""

MAX_UPSTREAM_CONNECTIONS = 10_000
"""The same for the connections to one upstream, each of which is a file descriptor."""

MAX_UPSTREAM_S = 7 * 86400.0
"""A week: no connection of a cloud lives as long."""

MIN_INTERVAL_S = 1.0
"""What is done to every upstream in such short intervals is a flood."""

_POOL = PoolLimits()


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of time and number."""

    hello_timeout_s: float = 10.0
    """`hello_timeout`: for a whole ClientHello, from the accepted connection on. A hello is two packets, so
    this allows for their loss, and bounds what an idle or slow client can hold."""

    connect_timeout_s: float = 10.0
    """`connect_timeout`: for TCP and TLS to an upstream, each attempt. Envoy's and ztunnel's value."""

    response_timeout_s: float = 30.0
    """`response_timeout`: from asking for a stream to the 200, all retries and the pauses before them
    included. Covers a Cloud Run cold start."""

    drain_delay_s: float | None = None
    """`drain_delay`: how long connections are accepted after SIGTERM, while readiness has fallen already, for
    Kubernetes' endpoints and load balancers take seconds to notice. None: 5 s if somebody has asked for
    readiness in the last minute, else 0, as nobody needs the time."""

    drain_timeout_s: float = 20.0
    """`drain_timeout`: for open tunnels to end once no connection is accepted any more; 0 ends them at once.
    With the delay before it leaves 5 of the 30 seconds between Kubernetes' SIGTERM and SIGKILL."""

    max_connections: int = 10_000
    """Downstream connections open at once; more are refused. Each holds two sockets' worth of buffers, and
    one file descriptor here plus its share of an upstream connection."""

    # Of the HTTP/2 connections to an upstream; shared/net/pool/pool_limits.py explains the defaults. With
    # several workers each has its own.

    streams_per_connection: int = _POOL.streams_per_connection
    """Tunnels on one HTTP/2 connection to an upstream before another is opened; the upstream may allow
    fewer."""

    connections_per_origin: int = _POOL.connections_per_origin
    """HTTP/2 connections to one upstream; when all are full, new tunnels wait for room."""

    max_waiting: int = _POOL.max_waiting
    """Tunnels that wait for a connection to one upstream, or for room on one; one more is refused."""

    upstream_idle_timeout_s: float = _POOL.idle_timeout_s
    """`upstream_idle_timeout`: how long an HTTP/2 connection without tunnels is kept."""

    max_connection_age_s: float = _POOL.max_age_s
    """`max_connection_age`: how long an HTTP/2 connection takes new tunnels, less up to a tenth by chance; it
    ends with its last tunnel. 0: for ever."""

    ping_interval_s: float = _POOL.ping_interval_s
    """`ping_interval`: an upstream with open tunnels that has been silent so long is asked for a sign of
    life. Google's front ends do not like it much more often. 0: never."""

    resolve_interval_s: float = _POOL.resolve_interval_s
    """`resolve_interval`: how often the name of an upstream is looked up again while there are connections to
    it; new tunnels go to none whose address is no longer there. 0: never."""

    def pool(self) -> PoolLimits:
        """Those of the HTTP/2 connections."""
        return PoolLimits(
            connect_timeout_s=self.connect_timeout_s,
            streams_per_connection=self.streams_per_connection,
            connections_per_origin=self.connections_per_origin,
            max_waiting=self.max_waiting,
            idle_timeout_s=self.upstream_idle_timeout_s,
            max_age_s=self.max_connection_age_s,
            ping_interval_s=self.ping_interval_s,
            resolve_interval_s=self.resolve_interval_s,
            session=SessionLimits(
                stream_window_bytes=self.stream_window_bytes,
                connection_window_bytes=self.connection_window_bytes,
            ),
        )

    max_lookups: int = MAX_LOOKUPS
    """`max_lookups`: names that clients choose and that are looked up at once; more wait. Names in this file
    have a share of their own."""

    max_lookups_per_client: int = MAX_LOOKUPS_PER_CLIENT
    """`max_lookups_per_client`: of those, for one address (of IPv6 a /64), and on the HBONE port for a SPIFFE
    ID; beyond 256 more that wait the client is refused."""

    max_connections_per_source: int = 0
    """`max_connections_per_source`: of those, from one address; more are refused. 0: as many as in all,
    because a load balancer, or all pods of a node behind its NAT, come from one address. Where clients have
    addresses of their own, some hundreds keep one of them from taking all."""

    max_connections_per_route: int = 0
    """`max_connections_per_route`: of those, on one route that has no `max_connections` itself; more are
    refused once their hello is read. 0: as many as in all, for a gateway with one route should serve it with
    all it has."""

    max_new_audiences: int = 600
    """`max_new_audiences`: tokens that are asked for in a minute, and as many at once, for audiences with
    whose token no tunnel has been opened yet; 0: no bound. A tenth of what Google's token exchange grants a
    project, and more services than a gateway's clients reach for in the first minute after its start."""

    max_new_audiences_per_source: int = 100
    """`max_new_audiences_per_source`: of those, for the clients of one address (of IPv6, one /64); 0: as many
    as in all. A client, or a gateway of the mesh with many behind it, reaches for some tens of services that
    nobody has reached for before."""

    idle_timeout_s: float = 3600.0
    """`idle_timeout`: an open tunnel without a byte either way for so long is reset; 0: never. Envoy's
    `tcp_proxy` has the same default; it only has to be longer than whatever probes sleepy connections."""

    max_tunnel_lifetime_s: float = 3300.0
    """`max_tunnel_lifetime`: of a tunnel with POST, less up to 10 % by chance; 0: for ever. 55 minutes,
    because Cloud Run resets any request after an hour at most; a service whose request timeout is shorter (by
    default it is 5 minutes) needs a route with less. Ended at rest if possible (`tunnel_clock`)."""

    max_buffered_bytes: int | None = None
    """`max_buffered`: held for all peers together. Above it connections are refused, 10 % above it the
    tunnels that hold most are reset; 0: no bound. None: half the container's, or else the machine's, memory.
    """

    stream_window_bytes: int = SessionLimits().stream_window_bytes
    """`stream_window`: what a service may send on one tunnel before the client has taken it. 1 MiB moves
    100 MB/s at 10 ms; a tunnel whose client does not read holds so much."""

    connection_window_bytes: int = CONNECTION_WINDOW_BYTES
    """`connection_window`: the same for all tunnels of one HTTP/2 connection. Should it be smaller than
    `streams_per_connection` times `stream_window`, tunnels that nobody reads can fill it and stop the others
    of their connection."""

    max_retries: int = 5
    """`max_retries`: times that a tunnel request is sent again before the client is refused, within
    `response_timeout`; 0: never. `shared/tunnel/retry.py` has when, and the reason for the number."""

    retry_budget_percent: int = 20
    """`retry_budget_percent`: of the requests that wait for an origin's answer so many in a hundred may be
    retries after a 429, 502 or 503, at least 10 in all: retries must not hold a service down. As Envoy's."""

    splice_pipes: int = 64
    """`splice_pipes`: pipes that forwarded connections may hold at once, in each worker; only one whose
    reader is slower than its sender holds any for longer than a moment. Beyond it bytes are copied; 0 copies
    all. 64 of 1 MiB are what Linux grants a user without privileges (pipe-user-pages-soft)."""

    half_closed_timeout_s: float = HALF_CLOSED_TIMEOUT_S
    """`half_closed_timeout`: how long one direction of a tunnel may be silent once the other has ended. Some
    proxies never pass an end on, and each such tunnel holds its slot. An hour: a late answer may take long,
    and Cloud Run ends any request then."""


def read(value: Value) -> Limits:
    """The limits of the mapping `value`. Raises ConfigError."""
    default = Limits()
    given = value.mapping(
        tuple(field.name.removesuffix("_s").removesuffix("_bytes") for field in fields(Limits))
    )

    def seconds(
        name: str, default_s: float, least_s: float = MIN_TIMEOUT_S, most_s: float = MAX_TIMEOUT_S
    ) -> float:
        return given.read(name, lambda value: value.duration(least_s, most_s), default_s)

    def interval(name: str, default_s: float) -> float:
        return given.read(name, _interval, default_s)

    def count(name: str, default_count: int, most: int, least: int = 1) -> int:
        return given.read(name, lambda value: value.integer(least, most), default_count)

    def size(name: str, default_bytes: int) -> int:
        return given.read(name, lambda value: value.size(LEAST_WINDOW_BYTES, MAX_WINDOW_BYTES), default_bytes)

    stream_window = size("stream_window", default.stream_window_bytes)
    connection_window = size("connection_window", default.connection_window_bytes)
    if connection_window < stream_window and not {"stream_window", "connection_window"} & given.failed:
        name = "connection_window" if given.get("connection_window") else "stream_window"
        culprit = given.need(name)
        culprit.refuse(culprit.error("connection_window is smaller than stream_window"))
    return Limits(
        hello_timeout_s=seconds("hello_timeout", default.hello_timeout_s),
        connect_timeout_s=seconds("connect_timeout", default.connect_timeout_s),
        response_timeout_s=seconds("response_timeout", default.response_timeout_s),
        drain_delay_s=given.read("drain_delay", lambda value: value.duration(0.0, MAX_TIMEOUT_S), None),
        drain_timeout_s=seconds("drain_timeout", default.drain_timeout_s, least_s=0.0),
        max_connections=count("max_connections", default.max_connections, MAX_CONNECTIONS),
        max_connections_per_source=count("max_connections_per_source", 0, MAX_CONNECTIONS, least=0),
        max_connections_per_route=count("max_connections_per_route", 0, MAX_CONNECTIONS, least=0),
        max_new_audiences=count("max_new_audiences", default.max_new_audiences, MAX_NEW_AUDIENCES, least=0),
        max_new_audiences_per_source=count(
            "max_new_audiences_per_source", default.max_new_audiences_per_source, MAX_NEW_AUDIENCES, least=0
        ),
        idle_timeout_s=given.read("idle_timeout", or_off, default.idle_timeout_s),
        max_tunnel_lifetime_s=given.read("max_tunnel_lifetime", or_off, default.max_tunnel_lifetime_s),
        max_buffered_bytes=given.read("max_buffered", _buffered, None),
        stream_window_bytes=stream_window,
        connection_window_bytes=connection_window,
        streams_per_connection=count("streams_per_connection", default.streams_per_connection, MAX_STREAMS),
        max_retries=count("max_retries", default.max_retries, MAX_RETRIES, least=0),
        retry_budget_percent=count("retry_budget_percent", default.retry_budget_percent, 100, least=0),
        half_closed_timeout_s=seconds("half_closed_timeout", default.half_closed_timeout_s),
        splice_pipes=count("splice_pipes", default.splice_pipes, MAX_PIPES, least=0),
        connections_per_origin=count(
            "connections_per_origin", default.connections_per_origin, MAX_UPSTREAM_CONNECTIONS
        ),
        max_waiting=count("max_waiting", default.max_waiting, MAX_CONNECTIONS),
        max_lookups=count("max_lookups", default.max_lookups, MOST_LOOKUPS),
        max_lookups_per_client=count("max_lookups_per_client", default.max_lookups_per_client, MOST_LOOKUPS),
        upstream_idle_timeout_s=seconds(
            "upstream_idle_timeout", default.upstream_idle_timeout_s, most_s=MAX_UPSTREAM_S
        ),
        max_connection_age_s=interval("max_connection_age", default.max_connection_age_s),
        ping_interval_s=interval("ping_interval", default.ping_interval_s),
        resolve_interval_s=interval("resolve_interval", default.resolve_interval_s),
    )


def _interval(value: Value) -> float:
    wanted_s = value.duration(0.0, MAX_UPSTREAM_S)
    if 0 < wanted_s < MIN_INTERVAL_S:
        raise value.error(f"must be 0, which turns it off, or {MIN_INTERVAL_S:g}s at least")
    return wanted_s


def _buffered(value: Value) -> int:
    return 0 if value.word() == "0" else value.size(LEAST_BUFFERED_BYTES, MAX_BUFFERED_BYTES)

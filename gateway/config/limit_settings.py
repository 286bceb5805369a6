"""What `limits:` in hgate's file can set: bounds of time, number and memory."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.config.sections import Context, file_table, read_fields
from gateway.config.yaml_nodes import Value
from shared.config.fields import setting
from shared.config.kinds import Count, Duration, Size
from shared.http2.session import SessionLimits
from shared.net.names.resolver import MAX_LOOKUPS, MAX_LOOKUPS_PER_CLIENT
from shared.net.pool.pool_limits import CONNECTION_WINDOW_BYTES, PoolLimits
from shared.net.relay.relay import HALF_CLOSED_TIMEOUT_S
from shared.tunnel.retry import RetryRules

MAX_TIMEOUT_S = 3600.0
"""The longest time that makes sense: Cloud Run ends any request after an hour."""

MIN_TIMEOUT_S = 0.001
"""A time limit of zero would refuse everything; only a drain may be instant."""

MAX_LASTING_S = 7 * 86400.0
"""The longest idle timeout, lifetime and age. For a longer one there is 0, which is none."""

LEAST_LASTING_S = 1.0
"""The shortest of them, and of the intervals. Deadlines of open tunnels are met to the second only, and an
upstream that is asked more often is flooded."""

MAX_CONNECTIONS = 1_000_000
"""More than the ports and file descriptors of one machine serve: a slip of the finger."""

MAX_NEW_AUDIENCES = 1_000_000
"""More than any service of tokens gives: a slip of the finger."""

MAX_PIPES = 10_000
"""Some 10 GiB that the kernel may have to keep for slow readers."""

MAX_STREAMS = 10_000
"""Streams on one connection. With more, one lost packet would hold up too many tunnels."""

LEAST_WINDOW_BYTES = 65535
"""RFC 9113 section 6.9.2: a peer may send as much before it has seen our SETTINGS."""

MAX_WINDOW_BYTES = (1 << 31) - 1
"""RFC 9113 section 6.9.1."""

LEAST_BUFFERED_BYTES = 1 << 20
"""Less would be used up by the first tunnel whose client reads slowly."""

MAX_BUFFERED_BYTES = 1 << 50
"""More than any machine has."""

MAX_RETRIES = 20
"""20 pauses take a minute on average. No client waits longer."""

MOST_LOOKUPS = 10_000
"""Each has two sockets, and no name server answers more at once."""

MAX_UPSTREAM_CONNECTIONS = 10_000
"""Connections to one upstream. Each is a file descriptor."""

TIMEOUT = Duration(MIN_TIMEOUT_S, MAX_TIMEOUT_S)
HANDSHAKE = Duration(MIN_TIMEOUT_S, 60.0)
LASTING = Duration(LEAST_LASTING_S, MAX_LASTING_S, off=True)
CONNECTIONS = Count(1, MAX_CONNECTIONS)
CONNECTIONS_OR_ALL = Count(0, MAX_CONNECTIONS)
WINDOW = Size(LEAST_WINDOW_BYTES, MAX_WINDOW_BYTES)
LOOKUPS = Count(1, MOST_LOOKUPS)
NEW_AUDIENCES = Count(0, MAX_NEW_AUDIENCES)

_POOL = PoolLimits()


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of time and number. Those of HTTP/2 connections hold for each worker."""

    hello_timeout_s: float = setting(
        TIMEOUT,
        10.0,
        "time for a whole ClientHello, from the accepted connection on",
        "It bounds what an idle or slow client can hold. Flag: `HELLO_TIMEOUT`.",
    )
    connect_timeout_s: float = setting(
        TIMEOUT, 10.0, "time for TCP and TLS to an upstream, each attempt", "Flag: `CONNECT`."
    )
    response_timeout_s: float = setting(
        TIMEOUT,
        30.0,
        "time from asking for a stream to the 200",
        "All retries and the pauses before them are included. It covers a cold start of Cloud Run. Flag: "
        "`UPSTREAM`.",
    )
    drain_delay_s: float | None = setting(
        Duration(0.0, MAX_TIMEOUT_S),
        None,
        "how long connections are accepted after SIGTERM",
        "Readiness has fallen already; endpoints of Kubernetes and load balancers take seconds to notice.",
        unset="5s if somebody has asked for readiness in the last minute, else 0",
    )
    drain_timeout_s: float = setting(
        Duration(0.0, MAX_TIMEOUT_S),
        20.0,
        "time for open tunnels to end once no connection is accepted any more",
        "0 ends them at once. With the delay before it 5 of the 30 seconds are left that Kubernetes has "
        "between SIGTERM and SIGKILL. Flag of a tunnel that is left: `STOPPED`.",
    )
    max_connections: int = setting(
        CONNECTIONS,
        10_000,
        "clients at once, in all",
        "More get RST. Each holds a file descriptor, and a share of an upstream connection. Flag: `LIMIT`.",
    )
    streams_per_connection: int = setting(
        Count(1, MAX_STREAMS),
        _POOL.streams_per_connection,
        "tunnels on one HTTP/2 connection to an upstream before another is opened",
        "The upstream may allow fewer.",
    )
    connections_per_origin: int = setting(
        Count(1, MAX_UPSTREAM_CONNECTIONS),
        _POOL.connections_per_origin,
        "HTTP/2 connections to one upstream",
        "When all are full, new tunnels wait for room.",
    )
    max_waiting: int = setting(
        CONNECTIONS,
        _POOL.max_waiting,
        "tunnels that wait for a connection to one upstream, or for room on one",
        "One more is refused. Flag: `UPSTREAM`.",
    )
    upstream_idle_timeout_s: float = setting(
        Duration(MIN_TIMEOUT_S, MAX_LASTING_S),
        _POOL.idle_timeout_s,
        "how long an HTTP/2 connection without tunnels is kept",
    )
    max_connection_age_s: float = setting(
        LASTING,
        _POOL.max_age_s,
        "how long an HTTP/2 connection accepts new tunnels; 0: for ever",
        "Less up to a tenth by chance. It ends with its last tunnel.",
    )
    ping_interval_s: float = setting(
        LASTING,
        _POOL.ping_interval_s,
        "silence after which an upstream with open tunnels is asked for a sign of life; 0: never",
        "Google's front ends do not like it much more often.",
    )
    resolve_interval_s: float = setting(
        LASTING,
        _POOL.resolve_interval_s,
        "how often the name of an upstream is looked up again while there are connections to it; 0: never",
        "New tunnels go to no connection whose address the name no longer has.",
    )
    max_lookups: int = setting(
        LOOKUPS,
        MAX_LOOKUPS,
        "names chosen by clients that are looked up at once",
        "More wait. Names in this file have a share of their own.",
    )
    max_lookups_per_client: int = setting(
        LOOKUPS,
        MAX_LOOKUPS_PER_CLIENT,
        "of them, for one address (IPv6: one /64), and on the HBONE port for one SPIFFE ID",
        "More wait; beyond 256 that wait the client is refused. Flag: `LIMIT`.",
    )
    max_connections_per_source: int = setting(
        CONNECTIONS_OR_ALL,
        0,
        "clients at once, from one address; 0: as many as in all",
        "A load balancer is one address, and so are all pods of a node behind its NAT. Where clients have "
        "addresses of their own, some hundreds keep one of them from taking all. Flag: `LIMIT`.",
    )
    max_connections_per_route: int = setting(
        CONNECTIONS_OR_ALL,
        0,
        "clients at once, on one route that has no max_connections; 0: as many as in all",
        "More get a TLS alert once their hello is read. Flag: `LIMIT`.",
    )
    max_new_audiences: int = setting(
        NEW_AUDIENCES,
        600,
        "tokens asked for in a minute, and as many at once, for new audiences; 0: no bound",
        "New is an audience that a client's name is part of and with whose token no tunnel was opened yet. "
        "More are refused: `LIMIT`. The default is a tenth of what Google's token exchange grants a project.",
    )
    max_new_audiences_per_source: int = setting(
        NEW_AUDIENCES, 100, "of them, for the clients of one address (IPv6: one /64); 0: as many as in all"
    )
    idle_timeout_s: float = setting(
        LASTING,
        3600.0,
        "an open tunnel without a byte either way for so long is reset; 0: never",
        "A reload counts for open tunnels, too. Flag: `IDLE`.",
    )
    max_tunnel_lifetime_s: float = setting(
        LASTING,
        3300.0,
        "how long a tunnel with POST may live; 0: for ever",
        "Less up to 10 % by chance. In its last tenth a tunnel that is silent for 5 s ends in order: "
        "`LIFETIME`; one that never is, is reset: `LIFETIME_RESET`. Cloud Run resets any request after an "
        "hour at most. A service with a shorter request timeout, which is 5 minutes by default, needs a "
        "route with less.",
    )
    max_buffered_bytes: int | None = setting(
        Size(LEAST_BUFFERED_BYTES, MAX_BUFFERED_BYTES, off=True),
        None,
        "bytes held for all peers together; 0: no bound",
        "Above it clients are refused: `LIMIT`. 10 % above it the tunnels that hold most are reset: "
        "`OVERLOAD`.",
        unset="half of the memory of the container, or else of the machine",
    )
    stream_window_bytes: int = setting(
        WINDOW,
        SessionLimits().most_stream_window_bytes,
        "bytes that a service may send on one tunnel before the client has taken them, at most",
        "A tunnel has 1 MiB of it at least, and more while its client reads; all tunnels share half of "
        "max_buffered for that. 64 MiB move 400 MB/s at 150 ms. Counts for new connections.",
    )
    connection_window_bytes: int = setting(
        WINDOW,
        CONNECTION_WINDOW_BYTES,
        "the same for all tunnels of one HTTP/2 connection, without what their windows have grown by",
        "If it is smaller than streams_per_connection times 1 MiB, tunnels that nobody reads can fill it and "
        "stop the others of their connection.",
    )
    max_retries: int = setting(
        Count(0, MAX_RETRIES),
        5,
        "times that a tunnel request is sent again before the client is refused; 0: never",
        "All of them have response_timeout together.",
    )
    retry_budget_percent: int = setting(
        Count(0, 100),
        20,
        "part of the requests that wait for an origin's answer, in percent, that may be retries",
        "It counts retries after a 429, 502 or 503; at least 10 are allowed. Retries must not hold a service "
        "down.",
    )
    max_cold_starts: int = setting(
        CONNECTIONS,
        RetryRules().max_starting,
        "tunnels that may wait for one service to start, on routes with cold_start",
        "For all services together half of max_connections, so that dead ones do not hold all. Further "
        "ones are refused as on routes without it.",
    )
    splice_pipes: int = setting(
        Count(0, MAX_PIPES),
        64,
        "pipes that forwarded connections may hold at once, in each worker; 0 copies all bytes",
        "Only a connection whose reader is slower than its sender holds any for longer than a moment. Beyond "
        "them bytes are copied. Linux grants a user without privileges 64 of 1 MiB (pipe-user-pages-soft).",
    )
    half_closed_timeout_s: float = setting(
        TIMEOUT,
        HALF_CLOSED_TIMEOUT_S,
        "how long one direction of a tunnel may be silent once the other has ended",
        "It is reset then. Some proxies never pass an end on, and each such tunnel holds its slot. Flag: "
        "`HALF_CLOSED`.",
    )

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
                stream_window_bytes=min(self.stream_window_bytes, SessionLimits().stream_window_bytes),
                most_stream_window_bytes=self.stream_window_bytes,
                connection_window_bytes=self.connection_window_bytes,
            ),
        )


def read(value: Value, context: Context) -> Limits:
    """The limits of the mapping `value`. Raises ConfigError."""
    given = value.mapping(tuple(file_table(Limits)))
    limits = Limits(**read_fields(Limits, given, context))
    names = {"stream_window", "connection_window"}
    session = limits.pool().session
    if session.connection_window_bytes < session.stream_window_bytes and not names & given.failed:
        culprit = given.need("connection_window")  # the default is large enough
        culprit.refuse(culprit.error("it is smaller than one tunnel's window: 1 MiB, or stream_window"))
    return limits

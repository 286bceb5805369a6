"""The bounds of a pool, and of each origin's part of it: numbers and times only."""

from __future__ import annotations

from dataclasses import dataclass

from shared.http2.session import SessionLimits
from shared.net.http2.liveness import STREAMS_TIMEOUT_S

CONNECTION_WINDOW_BYTES = 128 << 20
"""More than 100 streams of 1 MiB that nobody reads can hold: they must not stop the others of their
connection (ztunnel#1538). What all tunnels hold together has a bound of its own."""

_SESSION = SessionLimits(connection_window_bytes=CONNECTION_WINDOW_BYTES)


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Times are in seconds. Any of it may change while connections are open (`Pool.set_limits`)."""

    connect_timeout_s: float = 10.0
    """For TCP and TLS, each attempt: Envoy's and ztunnel's value."""

    streams_per_connection: int = 100
    """Streams on one connection before another is opened; the peer may allow fewer. 100 is what RFC 9113
    section 6.5.2 asks peers to allow at least."""

    connections_per_origin: int = 64
    """With 100 streams each, 6,400 tunnels to one service: six times what one instance of it accepts."""

    max_waiting: int = 6400
    """Openers that wait at an origin for a connection or for room: as many as all its connections could
    serve. One more would wait for somebody else's end, and is refused at once."""

    idle_timeout_s: float = 300.0
    """How long a connection without streams is kept: ztunnel's pool keeps as long. 0: closed at once."""

    max_age_s: float = 3600.0
    """How long a connection accepts new streams, less up to a tenth by chance; then it ends with its last
    stream. Load moves to new instances and addresses so. Cloud Run ends any request after an hour. 0: for
    ever."""

    ping_interval_s: float = 60.0
    """A PING goes to a peer that has been silent so long while streams are open. Google's front ends punish
    PINGs that come much more often, and those without streams (GOAWAY too_many_pings). 0: never."""

    ping_timeout_s: float = STREAMS_TIMEOUT_S
    """How long it may go unanswered."""

    resolve_interval_s: float = 30.0
    """How often an origin's name is looked up again while it has connections. 0: never."""

    session: SessionLimits = _SESSION
    """What peers may send ahead; counts for connections to come."""

"""Who may have how many of the open files that krun is allowed.

Each tunnel takes a file for its target, two more where it ends at the built-in mTLS end, which accepts it and
dials the app, and one for the app where inner HBONE is served. A request to the app takes one, and so does an
HTTP/2 connection. Where they together may want more than there are, each kind has a share of its own: those
that come by the thousand must not keep a tunnel from its target, the mTLS end from the app, or a program in
the container from its token.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from agent.config.settings import Settings

log = logging.getLogger("hbone.agent")

OWN_FILES = 64
"""For the event loop, the log, certificates and tokens that are read and replaced, and look-ups of names."""

STS_FILES = 64
"""For the token exchange: its connections, and as many refusals."""

LEAST = 16
"""Requests, and connections, that are left in any case: fewer would serve nobody."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How many of each there may be at once."""

    tunnels: int
    requests: int
    connections: int


def share_out(files: int, wanted: Shares, *, files_per_tunnel: int, token_exchange: bool) -> Shares:
    """Of `files` that may be open what each kind gets: what is `wanted`, if that fits. Else connections get
    an eighth, for a front end needs few, tunnels half, and requests the rest; what one does not want the
    others get; each kind gets `LEAST` in any case."""
    left = files - OWN_FILES - (STS_FILES if token_exchange else 0)
    least = Shares(*(min(LEAST, most) for most in (wanted.tunnels, wanted.requests, wanted.connections)))
    for_tunnels = min(left // 2, left - least.requests - least.connections)
    tunnels = max(least.tunnels, min(wanted.tunnels, for_tunnels // files_per_tunnel))
    connections = max(least.connections, min(wanted.connections, left // 8))
    requests = max(least.requests, min(wanted.requests, left - tunnels * files_per_tunnel - connections))
    tunnels = max(tunnels, min(wanted.tunnels, (left - requests - connections) // files_per_tunnel))
    connections = max(connections, min(wanted.connections, left - tunnels * files_per_tunnel - requests))
    return Shares(tunnels, requests, connections)


def egress_share(settings: Settings, files: int) -> int:
    """Of `files` that may be open how many the app's own connections into the mesh get: what
    HBONE_EGRESS_MAX_CONNECTIONS says, and a quarter at most."""
    wanted = 0 if settings.egress is None else settings.egress.max_connections
    share = min(wanted, max(LEAST, files // 4))
    if share < wanted:
        log.warning(
            "only %d files may be open (ulimit -Hn): room for %d of HBONE_EGRESS_MAX_CONNECTIONS=%d",
            *(files, share, wanted),
        )
    return share


def shares_of(settings: Settings, files: int, files_per_tunnel: int) -> Shares:
    """Of `files` that may be open; a warning says what is less than the settings say."""
    wanted = Shares(settings.max_tunnels, settings.max_requests, settings.max_connections)
    shares = share_out(
        files, wanted, files_per_tunnel=files_per_tunnel, token_exchange=settings.sts is not None
    )
    if shares != wanted:
        log.warning(
            "only %d files may be open (ulimit -Hn): room for %d of HBONE_MAX_TUNNELS=%d, %d of "
            "HBONE_MAX_REQUESTS=%d and %d of HBONE_MAX_CONNECTIONS=%d",
            *(files, shares.tunnels, wanted.tunnels, shares.requests, wanted.requests),
            *(shares.connections, wanted.connections),
        )
    return shares

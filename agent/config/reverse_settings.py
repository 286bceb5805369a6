"""What krun is told of the gateways that it dials: the variables that begin with HBONE_REVERSE.

Owned here: their names, defaults and bounds. Reading a variable is `settings.py`'s, what is done with them
`reverse_port.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.config.variables import (
    Variables,
    number_in,
    target,
    whole_in,
    words,
)
from shared import ports
from shared.address import Address, check_host_name
from shared.errors import UsageError
from shared.trust.peer_patterns import split_patterns

ENVIRONMENT: dict[str, str] = {
    "HBONE_REVERSE": "HOST:PORT of gateways to dial, separated by commas, to be reached through them (none)",
    "HBONE_REVERSE_NAME": "names to register there, separated by commas",
    "HBONE_REVERSE_PEER": "SPIFFE ID patterns of the gateways, separated by commas (the own trust domain)",
    "HBONE_REVERSE_GATEWAYS": "how many gateways stand behind each HOST:PORT, to be registered with all (1)",
    "HBONE_REVERSE_KEEPALIVE": "seconds of silence after which a gateway is asked whether it is there (20)",
    "HBONE_REVERSE_STREAMS": "tunnels that a connection to a gateway carries (1000)",
}

MAX_GATEWAYS = 16
"""Addresses, names, and gateways behind an address: each a connection, for each of the others."""

MAX_STREAMS = 10_000
MAX_KEEPALIVE_S = 3600.0
MIN_KEEPALIVE_S = 0.05


@dataclass(frozen=True, slots=True)
class ReverseSettings:
    """All that HBONE_REVERSE* says."""

    gateways: tuple[Address, ...]
    """Whom to dial."""

    names: tuple[str, ...]
    """What to register; each has a connection of its own to each gateway."""

    peers: tuple[str, ...] = ()
    """Patterns of the SPIFFE IDs that a gateway may have. Empty: the trust domain of our certificate."""

    behind_each: int = 1
    """Gateways behind each address. A load balancer gives us one of them at a time, and we dial until we have
    met them all."""

    keepalive_s: float = 20.0
    """Silence after which a PING goes out, and after as much again the connection is given up; far below what
    NAT takes to forget a connection (minutes)."""

    streams: int = 1000
    """Tunnels on one connection, and there is only one: as many as Cloud Run gives an instance at most."""


def read(read: Variables, own_domain: tuple[str, ...]) -> ReverseSettings | None:
    """The settings that `read` finds; None if no gateway is named. Raises UsageError."""
    gateways: tuple[Address, ...] = read("HBONE_REVERSE", _gateways, ())
    names: tuple[str, ...] = read("HBONE_REVERSE_NAME", _names, ())
    default = ReverseSettings(gateways, names)
    settings = ReverseSettings(
        gateways,
        names,
        peers=read("HBONE_REVERSE_PEER", split_patterns, own_domain),
        behind_each=read("HBONE_REVERSE_GATEWAYS", whole_in(1, MAX_GATEWAYS), default.behind_each),
        keepalive_s=read(
            "HBONE_REVERSE_KEEPALIVE", number_in(MIN_KEEPALIVE_S, MAX_KEEPALIVE_S), default.keepalive_s
        ),
        streams=read("HBONE_REVERSE_STREAMS", whole_in(1, MAX_STREAMS), default.streams),
    )
    if not gateways:
        return None
    if not names:
        raise UsageError("HBONE_REVERSE is set, but not HBONE_REVERSE_NAME: which name is this workload's?")
    return settings


def _gateways(text: str) -> tuple[Address, ...]:
    return tuple(target(word, ports.REVERSE) for word in words(text, MAX_GATEWAYS))


def _names(text: str) -> tuple[str, ...]:
    names = words(text, MAX_GATEWAYS)
    for name in names:
        check_host_name(name)
    return tuple(name.lower() for name in names)

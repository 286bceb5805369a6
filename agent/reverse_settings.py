"""What krun is told of the gateways that it dials: the variables that begin with HBONE_REVERSE.

Owned here: their names, defaults and bounds. Reading a variable is `settings.py`'s, what is done with them
`reverse.py`'s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from shared import ports
from shared.errors import UsageError
from shared.identity.spiffe import AllowList
from shared.net.address import Address, check_host_name

T = TypeVar("T")

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


class Reads(Protocol):
    """Reads one variable: the default if it is not set, UsageError if `parse` raises ValueError."""

    def __call__(self, name: str, parse: Callable[[str], Any], default: Any) -> Any: ...


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


def read(read: Reads, own_domain: tuple[str, ...]) -> ReverseSettings | None:
    """The settings that `read` finds; None if no gateway is named. Raises UsageError."""
    gateways: tuple[Address, ...] = read("HBONE_REVERSE", _gateways, ())
    names: tuple[str, ...] = read("HBONE_REVERSE_NAME", _names, ())
    default = ReverseSettings(gateways, names)
    settings = ReverseSettings(
        gateways,
        names,
        peers=read("HBONE_REVERSE_PEER", lambda text: AllowList.parse(text).patterns, own_domain),
        behind_each=read("HBONE_REVERSE_GATEWAYS", _whole(MAX_GATEWAYS), default.behind_each),
        keepalive_s=read("HBONE_REVERSE_KEEPALIVE", _keepalive, default.keepalive_s),
        streams=read("HBONE_REVERSE_STREAMS", _whole(MAX_STREAMS), default.streams),
    )
    if not gateways:
        return None
    if not names:
        raise UsageError("HBONE_REVERSE is set, but not HBONE_REVERSE_NAME: which name is this workload's?")
    return settings


def _words(text: str) -> list[str]:
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise ValueError("nothing but commas")
    if len(words) > MAX_GATEWAYS:
        raise ValueError(f"{len(words)} are more than {MAX_GATEWAYS}")
    return words


def _gateways(text: str) -> tuple[Address, ...]:
    found: list[Address] = []
    for word in _words(text):
        has_port = ":" in word.rpartition("]")[2]
        address = Address.parse(word if has_port else f"{word}:{ports.REVERSE}")
        if not address.port:
            raise ValueError("port 0 cannot be dialled")
        found.append(address)
    return tuple(found)


def _names(text: str) -> tuple[str, ...]:
    for word in (words := _words(text)):
        check_host_name(word)
    return tuple(word.lower() for word in words)


def _whole(most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,6}", text) or not 1 <= int(text) <= most:
            raise ValueError(f"has to be a whole number in 1..{most}")
        return int(text)

    return parse


def _keepalive(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise ValueError("not a number of seconds") from error
    if not math.isfinite(value) or not MIN_KEEPALIVE_S <= value <= MAX_KEEPALIVE_S:
        raise ValueError(f"has to be {MIN_KEEPALIVE_S:g}..{MAX_KEEPALIVE_S:g} seconds")
    return value

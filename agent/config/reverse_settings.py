"""Settings of krun about the gateways that it dials: the variables that begin with HBONE_REVERSE."""

from __future__ import annotations

from dataclasses import dataclass

from agent.config.variables import PEER_PATTERNS
from shared import ports
from shared.address import Address
from shared.config.fields import Environment, setting
from shared.config.kinds import Count, Duration, List, host_name, target
from shared.errors import UsageError

MAX_GATEWAYS = 16
"""Addresses, names, and gateways behind an address: each a connection, for each of the others."""

MAX_STREAMS = 10_000
MAX_KEEPALIVE_S = 3600.0
MIN_KEEPALIVE_S = 0.05


def _gateway(text: str) -> Address:
    return target(text, ports.REVERSE)


@dataclass(frozen=True, slots=True)
class ReverseSettings:
    """All that HBONE_REVERSE* set."""

    gateways: tuple[Address, ...] = setting(
        List(_gateway, MAX_GATEWAYS, "HOST:PORT or HOST"),
        (),
        "HOST:PORT of gateways to dial, separated by commas, to be reached through them",
        f"The port is {ports.REVERSE} if none is given.",
        unset="none",
        variable="HBONE_REVERSE",
    )
    names: tuple[str, ...] = setting(
        List(host_name, MAX_GATEWAYS, "names"),
        (),
        "names to register there, separated by commas",
        "Each name has a connection of its own to each gateway.",
        variable="HBONE_REVERSE_NAME",
    )
    peers: tuple[str, ...] = setting(
        PEER_PATTERNS,
        (),
        "SPIFFE ID patterns of the gateways, separated by commas",
        unset="the own trust domain",
        variable="HBONE_REVERSE_PEER",
    )
    """Empty: the trust domain of our certificate."""

    behind_each: int = setting(
        Count(1, MAX_GATEWAYS),
        1,
        "how many gateways stand behind each address, to be registered with all",
        "A load balancer gives krun one of them at a time, so krun dials until it has met them all.",
        variable="HBONE_REVERSE_GATEWAYS",
    )
    keepalive_s: float = setting(
        Duration(MIN_KEEPALIVE_S, MAX_KEEPALIVE_S),
        20.0,
        "silence after which a gateway is asked whether it is there",
        "After as much silence again the connection is given up. NAT forgets an idle connection within "
        "minutes.",
        variable="HBONE_REVERSE_KEEPALIVE",
    )
    streams: int = setting(
        Count(1, MAX_STREAMS),
        1000,
        "tunnels that a connection to a gateway carries",
        "There is one connection to each gateway; Cloud Run gives an instance 1000 requests at most.",
        variable="HBONE_REVERSE_STREAMS",
    )


def read(read: Environment, own_domain: tuple[str, ...]) -> ReverseSettings | None:
    """The settings that `read` finds; None if no gateway is named. `own_domain` has the patterns of our own
    trust domain, if it is set. Raises UsageError."""
    settings = ReverseSettings(**{"peers": own_domain} | read.given(ReverseSettings))
    if not settings.gateways:
        return None
    if not settings.names:
        raise UsageError("HBONE_REVERSE is set, but not HBONE_REVERSE_NAME: which name is this workload's?")
    return settings

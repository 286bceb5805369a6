"""What `reverse:` in the gateway's file can set: the port that workloads dial, certificates, rules, bounds.

Owned here: the fields of that mapping, their defaults and bounds. The rest of the file is `config.py`'s, what
the rules mean `reverse_rules.py`'s. Certificates are read when the port opens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.config.hbone_settings import MAX_LISTENERS, addresses, rules
from gateway.config.name_notes import note_name
from gateway.config.named_files import later_file
from gateway.config.yaml_nodes import Value
from gateway.rules.reverse_rules import ReverseRule, check_name_pattern
from shared import ports
from shared.address import Address
from shared.trust.peer_patterns import UNTOLD, TrustDomain

DEFAULT_LISTEN = (Address("0.0.0.0", ports.REVERSE),)
"""The port that the original has for it."""

MAX_CONNECTIONS = 100_000
"""A slip of the finger beyond, for names as well."""

MAX_TIMEOUT_S = 60.0
MIN_TIMEOUT_S = 0.001

MAX_KEEPALIVE_S = 3600.0
"""Longer than any NAT remembers an idle connection."""

MIN_KEEPALIVE_S = 0.05
"""Below it a busy loop's turn would count as silence."""

_FIELDS = (
    "listen",
    "certificates",
    "rules",
    "handshake_timeout",
    "keepalive",
    "wait",
    "max_connections",
    "max_names",
    "max_connections_per_name",
    "crl",
)


@dataclass(frozen=True, slots=True)
class ReverseSettings:
    """All of `reverse:`."""

    certificates: Path
    """`certificates`: a folder with our certificate, key and roots by any customary names, which are read
    again when they change."""

    rules: tuple[ReverseRule, ...]
    """`rules`: the first that takes a registration decides; one that none takes is refused."""

    listen: tuple[Address, ...] = DEFAULT_LISTEN
    """`listen`: where workloads connect."""

    handshake_timeout_s: float = 10.0
    """`handshake_timeout`: from accept to the end of the TLS handshake, and as long again for the workload's
    answer that it is there."""

    keepalive_s: float = 20.0
    """`keepalive`: PING after so much silence; a workload silent for as long again is gone. Far below the
    minutes after which NAT and load balancers forget a connection (AWS 350 s, Azure 240 s, Google 600 s)."""

    wait_s: float = 2.0
    """`wait`: how long a client waits for a workload to come (back) whose name nobody has registered, or for
    a free stream. Covers a workload's way from one hgate to its successor; 0 refuses at once."""

    max_connections: int = 1000
    """`max_connections`: open at once, handshakes included; more are reset. A workload has one for each of
    its names, and with several workers one for each of these."""

    max_names: int = 1000
    """`max_names`: registered at once; a further one is refused."""

    max_connections_per_name: int = 100
    """`max_connections_per_name`: registered for one name at once, so that one deployment that runs wild
    leaves room for the others."""

    crl: Path | None = None
    """`crl`: a file with certificate revocation lists, which is followed; None: nobody is revoked."""

    trust: TrustDomain = UNTOLD
    """Our trust domain and its aliases, from the top of the file."""

    @property
    def max_connections_per_source(self) -> int:
        """0, no bound: many workloads come from one NAT's address, and each has proved who it is."""
        return 0

    @property
    def tls12(self) -> bool:
        """Whether TLS 1.2 is let in: no, for who connects here is krun, which speaks 1.3."""
        return False


def read(value: Value, folder: Path, trust: TrustDomain = UNTOLD) -> ReverseSettings:
    """The settings of the mapping `value`; paths in it start from `folder`. Raises ConfigError."""
    given = value.mapping(_FIELDS)
    default = ReverseSettings(Path(), ())

    def count(name: str, default_count: int) -> int:
        return given.read(name, lambda value: value.integer(1, MAX_CONNECTIONS), default_count)

    def seconds(name: str, default_s: float, least_s: float, most_s: float = MAX_TIMEOUT_S) -> float:
        return given.read(name, lambda value: value.duration(least_s, most_s), default_s)

    return ReverseSettings(
        certificates=given.read_needed("certificates", lambda value: folder / value.text(), folder),
        rules=given.read_needed(
            "rules",
            lambda value: rules(value, "names", check_name_pattern, ReverseRule, trust, note=note_name),
            (),
            "write rules: [] to refuse every registration",
        ),
        listen=given.read("listen", lambda value: addresses(value, MAX_LISTENERS), default.listen),
        handshake_timeout_s=seconds("handshake_timeout", default.handshake_timeout_s, MIN_TIMEOUT_S),
        keepalive_s=seconds("keepalive", default.keepalive_s, MIN_KEEPALIVE_S, MAX_KEEPALIVE_S),
        wait_s=seconds("wait", default.wait_s, 0.0),
        max_connections=count("max_connections", default.max_connections),
        max_names=count("max_names", default.max_names),
        max_connections_per_name=count("max_connections_per_name", default.max_connections_per_name),
        crl=given.read("crl", lambda value: later_file(value, folder), None),
        trust=trust,
    )

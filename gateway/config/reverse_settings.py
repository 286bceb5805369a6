"""What `reverse:` in hgate's file can set: the port that workloads dial, certificates, rules, bounds.

Certificates are read when the port opens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gateway.config.limit_settings import HANDSHAKE
from gateway.config.name_notes import note_name
from gateway.config.rule_settings import CERTIFICATES, DENY, FROM, patterns, rules
from gateway.config.sections import LISTEN, Context, Structure, Table, read_section
from gateway.config.yaml_nodes import Value
from gateway.rules.reverse_rules import ReverseRule, check_name_pattern
from shared import ports
from shared.address import Address
from shared.config.fields import Setting, setting
from shared.config.kinds import Count, Duration, FilePath, FolderPath
from shared.trust.peer_patterns import UNTOLD, TrustDomain

DEFAULT_LISTEN = (Address("0.0.0.0", ports.REVERSE),)
"""The port that the original has for it."""

CONNECTIONS = Count(1, 100_000)
"""Connections, or names. A larger number is a typing mistake."""

MAX_WAIT_S = 60.0

MAX_KEEPALIVE_S = 3600.0
"""Longer than any NAT remembers an idle connection."""

MIN_KEEPALIVE_S = 0.05
"""With less, a turn of a busy event loop would count as silence."""


def _names(value: Value, context: Context) -> tuple[str, ...]:
    def read(item: Value) -> str:
        pattern = item.parsed(check_name_pattern)
        note_name(item, pattern, context.denies)
        return pattern

    return patterns(value, read)


RULE: Table = {
    "from": FROM,
    "names": Setting(
        Structure(_names, "list of globs"),
        (),
        "names that the rule is about",
        "{namespace} and {service_account} are those of the workload's certificate.",
        needed="",
    ),
    "deny": DENY,
}


def _rules(value: Value, context: Context) -> tuple[ReverseRule, ...]:
    return rules(value, context, RULE, ReverseRule)


@dataclass(frozen=True, slots=True)
class ReverseSettings:
    """All of `reverse:`."""

    certificates: Path = setting(
        FolderPath(),
        Path(),
        "folder with our certificate, key and roots",
        CERTIFICATES,
        needed="",
        restart=True,
    )
    rules: tuple[ReverseRule, ...] = setting(
        Structure(_rules, "list of rules", RULE, each=True),
        (),
        "who may register which names",
        "The first rule that matches a registration decides; one that none matches is refused.",
        needed="write rules: [] to refuse every registration",
    )
    listen: tuple[Address, ...] = setting(
        LISTEN, DEFAULT_LISTEN, "where workloads connect", unset=f"`{DEFAULT_LISTEN[0]}`", restart=True
    )
    handshake_timeout_s: float = setting(
        HANDSHAKE,
        10.0,
        "time from accept to the end of the TLS handshake",
        "The workload has as long again for its answer that it is there.",
        restart=True,
    )
    keepalive_s: float = setting(
        Duration(MIN_KEEPALIVE_S, MAX_KEEPALIVE_S),
        20.0,
        "silence after which a workload is asked for a sign of life",
        "A workload that is silent for as long again is gone. NAT and load balancers forget a connection "
        "after minutes (AWS 350 s, Azure 240 s, Google 600 s).",
        restart=True,
    )
    wait_s: float = setting(
        Duration(0.0, MAX_WAIT_S),
        2.0,
        "how long a client waits for a workload whose name nobody has registered, or for a free stream",
        "It covers a workload's way from one hgate to its successor. 0 refuses at once.",
        restart=True,
    )
    max_connections: int = setting(
        CONNECTIONS,
        1000,
        "connections at once, handshakes included",
        "More are reset. A workload has one for each of its names, and with several workers one for each of "
        "these. Flag: `LIMIT`.",
        restart=True,
    )
    max_names: int = setting(
        CONNECTIONS, 1000, "names registered at once", "One more is refused.", restart=True
    )
    max_connections_per_name: int = setting(
        CONNECTIONS,
        100,
        "connections registered for one name at once",
        "So a deployment that runs wild leaves room for the others.",
        restart=True,
    )
    crl: Path | None = setting(
        FilePath(),
        None,
        "file with certificate revocation lists of the workloads, which is followed",
        unset="none",
        restart=True,
    )
    trust: TrustDomain = UNTOLD
    """Our trust domain and its aliases, from the top of the file."""

    @property
    def max_connections_per_source(self) -> int:
        """0, no bound: many workloads come from one NAT's address, and each has proved who it is."""
        return 0

    @property
    def tls12(self) -> bool:
        """Whether TLS 1.2 is accepted: no, for krun connects here, and it speaks 1.3."""
        return False


def read(value: Value, context: Context) -> ReverseSettings:
    """The settings of the mapping `value`. Raises ConfigError."""
    return read_section(ReverseSettings, value, context, trust=context.trust)

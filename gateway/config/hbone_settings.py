"""What `hbone:` in hgate's file can set: the HBONE port, its certificates, its rules and bounds.

Certificates are read when the port opens or a connection is made: what renews them may come up later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gateway.config import jwt_settings
from gateway.config.jwt_settings import CLAIMS, JwtSettings
from gateway.config.limit_settings import HANDSHAKE, LASTING
from gateway.config.name_notes import note_target
from gateway.config.rule_settings import CERTIFICATES, DENY, FROM, MAX_RULES, patterns, rules
from gateway.config.sections import LISTEN, Context, Section, Structure, Table, read_section
from gateway.config.yaml_nodes import Value
from gateway.rules.hbone_rules import Rule, bypasses, check_target
from shared import ports
from shared.address import Address
from shared.config.fields import Setting, setting
from shared.config.kinds import Choice, Count, FilePath, FolderPath, Parsed
from shared.trust.peer_patterns import UNTOLD, TrustDomain

DEFAULT_LISTEN = (Address("0.0.0.0", ports.HBONE),)
"""Where ztunnel and waypoints dial HBONE."""

MAX_CONNECTIONS = 100_000
MAX_TUNNELS = 1_000_000
"""A larger number, here and for connections, is a typing mistake."""


def _targets(value: Value, context: Context) -> tuple[str, ...]:
    def read(item: Value) -> str:
        pattern = item.parsed(check_target)
        note_target(item, pattern, context.denies)
        return pattern

    return patterns(value, read)


RULE: Table = {
    "from": FROM,
    "to": Setting(
        Structure(_targets, "list of HOST:PORT, with globs, networks and *"),
        (),
        "targets that the rule is about",
        "HOST is a name, in which * is a label or a part of one and ** one or more labels, an IP address, or "
        "a network such as 10.0.0.0/8; * is any. PORT is a number or *.",
        needed="",
    ),
    "deny": DENY,
    "claims": CLAIMS,
}


def _rules(value: Value, context: Context) -> tuple[Rule, ...]:
    found = rules(value, context, RULE, Rule)
    items = value.items(MAX_RULES)
    if len(found) < len(items):
        return found  # a rule with a mistake is left out: how the others go together is not known yet
    found = tuple(replace(rule, line=item.line) for rule, item in zip(found, items, strict=True))
    for index, text in bypasses(found):
        items[index].warn(text)
    return found


@dataclass(frozen=True, slots=True)
class HboneSettings:
    """All of `hbone:`."""

    certificates: Path = setting(
        FolderPath(),
        Path(),
        "folder with our certificate, key and roots",
        CERTIFICATES,
        needed="",
        restart=True,
    )
    rules: tuple[Rule, ...] = setting(
        Structure(_rules, "list of rules", RULE, each=True),
        (),
        "who may have tunnels to where",
        "The first rule that matches a tunnel decides; a tunnel that none matches is refused.",
        needed="write rules: [] to refuse every tunnel",
    )
    listen: tuple[Address, ...] = setting(
        LISTEN,
        DEFAULT_LISTEN,
        "where members of the mesh connect",
        unset=f"`{DEFAULT_LISTEN[0]}`",
        restart=True,
    )
    tunnel_listen: tuple[Address, ...] = setting(
        LISTEN,
        (),
        "where a front end brings members of the mesh that reach only HTTPS",
        f"HTTP/2 without TLS (h2c): each POST of /_hbone/{ports.HBONE} carries a connection as listen has "
        f"it, with the member's own mTLS in it. The customary port is {ports.HBONE_H2C}. Limits by address "
        "count the front end's.",
        unset="nowhere",
        restart=True,
    )
    tls12: bool = setting(
        Parsed(lambda text: Choice(("1.3", "1.2")).parse(text) == "1.2", "1.3 or 1.2"),
        False,
        "lowest version of TLS",
        "All of the mesh speaks 1.3; an Envoy that Istio has not configured needs "
        "tls_maximum_protocol_version for it. With 1.2 onlookers see certificates.",
        name="min_tls",
        unset="`1.3`",
        restart=True,
    )
    handshake_timeout_s: float = setting(HANDSHAKE, 10.0, "time from accept to the end of the TLS handshake")
    max_connections: int = setting(
        Count(1, MAX_CONNECTIONS),
        1000,
        "connections at once, handshakes included",
        "More are reset. A ztunnel opens one for each workload on its node, or several from a hundred "
        "tunnels on. Flag: `LIMIT`.",
    )
    max_tunnels: int = setting(
        Count(1, MAX_TUNNELS),
        10_000,
        "tunnels at once, those that are being connected included",
        "More get 503. Each holds a file descriptor. Flag: `LIMIT`.",
    )
    max_connections_per_source: int = setting(
        Count(0, MAX_CONNECTIONS),
        0,
        "connections at once, from one address; 0: as many as in all",
        "A ztunnel opens a connection for each workload of its node, maybe all from the node's address.",
    )
    max_tunnels_per_identity: int = setting(
        Count(0, MAX_TUNNELS),
        0,
        "tunnels at once, of one SPIFFE ID; 0: as many as in all",
        "An ingress gateway may rightly have them all.",
    )
    idle_timeout_s: float = setting(
        LASTING, 3600.0, "a tunnel without a byte either way for so long is reset; 0: never"
    )
    max_tunnel_lifetime_s: float = setting(
        LASTING,
        0.0,
        "how long a tunnel may live; 0: for ever",
        "As of a route. Nothing on the way ends tunnels of the mesh.",
    )
    crl: Path | None = setting(
        FilePath(),
        None,
        "file with certificate revocation lists of the peers, which is followed",
        unset="none",
        restart=True,
    )
    trust: TrustDomain = UNTOLD
    """Our trust domain and its aliases, from the top of the file."""

    jwt: JwtSettings | None = setting(
        Section(JwtSettings, jwt_settings.read),
        None,
        "whose tokens count, for rules with claims",
        unset="nobody's",
    )


def read(value: Value, context: Context) -> HboneSettings:
    """The settings of the mapping `value`. Raises ConfigError."""
    return read_section(HboneSettings, value, context, trust=context.trust)

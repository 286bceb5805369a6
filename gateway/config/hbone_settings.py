"""What `hbone:` in the gateway's file can set: the HBONE port, its certificates, its rules and bounds.

Owned here: the fields of that mapping, their defaults and bounds, and of a route's `identity`. The rest of
the file is `config.py`'s, how YAML is read `yaml_nodes.py`'s, what the rules mean `hbone_rules.py`'s.
Certificates are read when the listener starts or a connection is made: what renews them may come up later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from gateway.config import jwt_settings
from gateway.config.jwt_settings import JwtSettings
from gateway.config.name_notes import note_target
from gateway.config.named_files import later_file
from gateway.config.yaml_nodes import Fields, Value
from gateway.rules.claims import Claims
from gateway.rules.hbone_rules import Rule, bypasses, check_target
from shared import ports
from shared.address import Address, check_host_name
from shared.net.tls.mesh_tls import MeshIdentity
from shared.trust.peer_patterns import (
    ANY,
    UNTOLD,
    TrustDomain,
    check_pattern,
    of_workloads,
)

T = TypeVar("T")

DEFAULT_LISTEN = (Address("0.0.0.0", ports.HBONE),)
"""Where ztunnel and waypoints look for HBONE."""

MAX_RULES = 1000
"""A tunnel is held against each, about a microsecond each, before it is refused."""

MAX_PATTERNS = 100
"""`from` or `to` patterns of one rule."""

MAX_LISTENERS = 16
"""Addresses in `listen`, as for the gateway's other port."""

MAX_CONNECTIONS = 100_000
"""A slip of the finger, as is more of the next one."""

MAX_TUNNELS = 1_000_000

MAX_LASTING_S = 7 * 86400.0
"""The longest idle timeout and lifetime: what is meant to be longer is meant to be off, which is 0."""

LEAST_LASTING_S = 1.0
"""Deadlines of open tunnels are met to the second."""

MAX_HANDSHAKE_S = 60.0
MIN_HANDSHAKE_S = 0.001

_FIELDS = (
    "listen",
    "certificates",
    "rules",
    "min_tls",
    "handshake_timeout",
    "max_connections",
    "max_connections_per_source",
    "max_tunnels",
    "max_tunnels_per_identity",
    "idle_timeout",
    "max_tunnel_lifetime",
    "crl",
    "jwt",
)

RELOADED = (
    "rules",
    "handshake_timeout_s",
    "max_connections",
    "max_connections_per_source",
    "max_tunnels",
    "max_tunnels_per_identity",
    "idle_timeout_s",
    "max_tunnel_lifetime_s",
    "trust",
    "jwt",
)
"""Fields of `HboneSettings` that a reload changes; the others take effect at the next start."""


@dataclass(frozen=True, slots=True)
class HboneSettings:
    """All of `hbone:`."""

    certificates: Path
    """`certificates`: a folder with our certificate, key and roots by any customary names, which are read
    again when they change."""

    rules: tuple[Rule, ...]
    """`rules`: the first that takes a tunnel decides; one that none takes is refused."""

    listen: tuple[Address, ...] = DEFAULT_LISTEN
    """`listen`: where members of the mesh connect."""

    tls12: bool = False
    """`min_tls`: "1.3" or "1.2". All of the mesh speaks 1.3 (an Envoy that Istio has not configured needs
    `tls_maximum_protocol_version` for it); 1.2 shows certificates to onlookers."""

    handshake_timeout_s: float = 10.0
    """`handshake_timeout`: from accept to the end of the TLS handshake; as long as for a ClientHello."""

    max_connections: int = 1000
    """`max_connections`: open at once, handshakes included; more are reset. A ztunnel opens one for each
    workload on its node, or several from a hundred tunnels on."""

    max_tunnels: int = 10_000
    """`max_tunnels`: open at once, those that are being connected included; more get 503. Each holds a file
    descriptor, like one of `limits.max_connections`, which has the same default."""

    max_connections_per_source: int = 0
    """`max_connections_per_source`: of the connections, from one address; 0: as many as in all. A ztunnel
    opens a connection for each workload of its node, maybe all from the node's address."""

    max_tunnels_per_identity: int = 0
    """`max_tunnels_per_identity`: of the tunnels, those of one SPIFFE ID; 0: as many as in all. An ingress
    gateway may rightly have them all."""

    idle_timeout_s: float = 3600.0
    """`idle_timeout`: as `limits.idle_timeout`; 0: never."""

    max_tunnel_lifetime_s: float = 0.0
    """`max_tunnel_lifetime`: as of a route; 0: for ever, for nothing on the way ends tunnels of the mesh."""

    crl: Path | None = None
    """`crl`: a file with certificate revocation lists, which is followed; None: nobody is revoked."""

    trust: TrustDomain = UNTOLD
    """Our trust domain and its aliases, from the top of the file."""

    jwt: JwtSettings | None = None
    """`jwt`: whose tokens count, for rules with claims; None: nobody's."""


def read(value: Value, folder: Path, trust: TrustDomain = UNTOLD) -> HboneSettings:
    """The settings of the mapping `value`; paths in it start from `folder`. Raises ConfigError."""
    given = value.mapping(_FIELDS)
    default = HboneSettings(Path(), ())

    def count(name: str, default_count: int, most: int, least: int = 1) -> int:
        return given.read(name, lambda value: value.integer(least, most), default_count)

    has_jwt = "jwt" in given.values or "jwt" in given.failed

    def claims(found: Value, deny: bool) -> Claims:
        return jwt_settings.read_claims(found, deny=deny, has_jwt=has_jwt)

    return HboneSettings(
        certificates=given.read_needed("certificates", lambda value: folder / value.text(), folder),
        rules=given.read_needed(
            "rules",
            lambda value: _rules(value, trust, claims),
            (),
            "write rules: [] to refuse every tunnel",
        ),
        listen=given.read("listen", lambda value: addresses(value, MAX_LISTENERS), default.listen),
        tls12=given.read("min_tls", lambda value: value.choice(("1.3", "1.2")) == "1.2", False),
        handshake_timeout_s=given.read(
            "handshake_timeout",
            lambda value: value.duration(MIN_HANDSHAKE_S, MAX_HANDSHAKE_S),
            default.handshake_timeout_s,
        ),
        max_connections=count("max_connections", default.max_connections, MAX_CONNECTIONS),
        max_tunnels=count("max_tunnels", default.max_tunnels, MAX_TUNNELS),
        max_connections_per_source=count("max_connections_per_source", 0, MAX_CONNECTIONS, least=0),
        max_tunnels_per_identity=count("max_tunnels_per_identity", 0, MAX_TUNNELS, least=0),
        idle_timeout_s=given.read("idle_timeout", or_off, default.idle_timeout_s),
        max_tunnel_lifetime_s=given.read("max_tunnel_lifetime", or_off, default.max_tunnel_lifetime_s),
        crl=given.read("crl", lambda value: later_file(value, folder), None),
        trust=trust,
        jwt=given.read("jwt", lambda value: jwt_settings.read(value, folder), None),
    )


def _rules(value: Value, trust: TrustDomain, claims: Callable[[Value, bool], Claims]) -> tuple[Rule, ...]:
    found = rules(value, "to", check_target, Rule, trust, claims, note=note_target)
    items = value.items(MAX_RULES)
    if len(found) < len(items):
        return found  # a rule with a mistake is left out: how the others go together cannot be told yet
    found = tuple(replace(rule, line=item.line) for rule, item in zip(found, items, strict=True))
    for index, text in bypasses(found):
        items[index].warn(text)
    return found


def or_off(value: Value) -> float:
    """An idle timeout or a lifetime in seconds; 0 switches it off. Raises ConfigError."""
    return 0.0 if value.word() == "0" else value.duration(LEAST_LASTING_S, MAX_LASTING_S)


def addresses(value: Value, most: int) -> tuple[Address, ...]:
    """A list of addresses to listen on, at least one and at most `most`, none twice. Raises ConfigError."""
    found: list[Address] = []

    def read(item: Value) -> None:
        address = item.address(least_port=0)
        if address.port and address in found:
            raise item.error(f"{address} stands in the list twice")
        found.append(address)

    value.each(most, read)
    if not value.items(most):
        raise value.error("needs at least one address")
    return tuple(found)


def mesh_identity(given: Fields, base: Path, trust: TrustDomain = UNTOLD) -> MeshIdentity:
    """The identity of a route's own fields `identity`, `peer`, `sni` and `crl`; paths start from `base`.
    Raises ConfigError."""
    identity = given.need("identity")
    if "peer" not in given.values and "peer" not in given.failed:
        raise identity.error("needs peer beside it: who the server has to be")
    return MeshIdentity(
        base / identity.text(),
        given.read("peer", lambda value: _peers(value, trust, anybody=False), ()),
        given.read("sni", lambda value: "" if value.word() == "none" else value.parsed(_server_name), ""),
        given.read("crl", lambda value: later_file(value, base), None),
        trust,
    )


def rules(
    value: Value,
    wanted: str,
    check_wanted: Callable[[str], str],
    make: Callable[..., T],
    trust: TrustDomain = UNTOLD,
    claims: Callable[[Value, bool], Claims] | None = None,
    *,
    note: Callable[[Value, str, bool], None],
) -> tuple[T, ...]:
    """A list of rules, each made of its identities (`from`), what they want (patterns in the field `wanted`),
    whether it denies that, and, where there are tokens, what `claims` reads of the field of that name, which
    is told the former. `note` may warn of a pattern of the field `wanted`. Raises ConfigError."""
    known = ("from", wanted, "deny") if claims is None else ("from", wanted, "deny", "claims")

    def read(item: Value) -> T:
        given = item.mapping(known)
        denies = given.read("deny", lambda value: value.choice(("true", "false")) == "true", False)
        peers = given.read_needed("from", lambda value: _peers(value, trust, anybody=True), ())
        patterns = given.read_needed(wanted, lambda value: _patterns(value, check_wanted, denies, note), ())
        asked = given.get("claims")
        if claims is None or asked is None:
            return make(peers, patterns, denies)
        return make(peers, patterns, denies, asked.tried(lambda asked: claims(asked, denies), ()))

    return tuple(value.each(MAX_RULES, read))


def _peers(value: Value, trust: TrustDomain, *, anybody: bool) -> tuple[str, ...]:
    """Patterns of peers; of our own trust domain they may be written as `namespace` and `service_account`."""

    def read(item: Value) -> str:
        if not item.is_mapping:
            return item.parsed(lambda text: check_pattern(text, trust, anybody=anybody))
        given = item.mapping(("namespace", "service_account"))
        namespace, account = (
            given.read(name, lambda found: found.parsed(_glob), ANY)
            for name in ("namespace", "service_account")
        )
        try:
            return check_pattern(of_workloads(namespace, account), trust)
        except ValueError as error:
            raise item.error(str(error)) from error

    if not value.items(MAX_PATTERNS):
        raise value.error("needs at least one pattern")
    return tuple(value.each(MAX_PATTERNS, read))


def _glob(text: str) -> str:
    of_workloads(text, ANY)
    return text


def _patterns(
    value: Value, check: Callable[[str], str], denies: bool, note: Callable[[Value, str, bool], None]
) -> tuple[str, ...]:
    def read(item: Value) -> str:
        pattern = item.parsed(check)
        note(item, pattern, denies)
        return pattern

    if not value.items(MAX_PATTERNS):
        raise value.error("needs at least one pattern")
    return tuple(value.each(MAX_PATTERNS, read))


def _server_name(text: str) -> str:
    check_host_name(text)
    return text.lower()

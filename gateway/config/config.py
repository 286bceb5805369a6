"""The gateway's file: what can be set, what it means, and what each setting may be.

Owned here: the fields of the file, their defaults and bounds, and that no mistake gets past the start or a
reload. What is inside `routes`, `limits`, `hbone`, `reverse` and `tokens` has a module each
(`route_settings.py` and so on); how YAML is read with its line numbers is `yaml_nodes.py`'s matter. A mistake
is a ConfigError with file, line, field and reason (exit code 78); all of a file are told at once. The only
I/O is reading the file itself and the `ca` files that it names, and looking whether others are there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from gateway.config import (
    hbone_settings,
    limit_settings,
    placeholders,
    reverse_settings,
    route_settings,
    token_settings,
)
from gateway.config.hbone_settings import HboneSettings, addresses
from gateway.config.limit_settings import Limits
from gateway.config.reverse_settings import ReverseSettings
from gateway.config.yaml_nodes import (
    MAX_FILE_BYTES,
    Fields,
    Report,
    Value,
    document,
)
from gateway.rules.routes import Route
from shared import ports, regular_files
from shared.address import Address
from shared.credentials.token_sources.token_settings import TokenSettings
from shared.errors import ConfigError
from shared.trust.peer_patterns import MAX_ALIASES, TrustDomain
from shared.trust.spiffe import SpiffeId

DEFAULT_LISTEN = (Address("0.0.0.0", ports.SNI_ISTIO), Address("0.0.0.0", ports.SNI))
"""Istio's customary gateway port and the original's."""

DEFAULT_ADMIN = Address("127.0.0.1", ports.ADMIN)
"""Dumps and debugging are for people on the machine only."""

DEFAULT_METRICS = Address("0.0.0.0", ports.METRICS)
"""Where Istio's scrape configurations look."""

DEFAULT_HEALTH = Address("0.0.0.0", ports.HEALTH)
"""The kubelet asks from outside the pod."""

MAX_LISTENERS = 16
"""Addresses in `listen`; each is a socket for as long as the process runs."""

_SOME_DOMAIN = TrustDomain("cluster.local")  # in place of a malformed one, so that rules can be checked


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """All of the gateway's file."""

    routes: tuple[Route, ...]
    """`routes`: the first that takes a name decides; a name that none takes is refused."""

    listen: tuple[Address, ...] = DEFAULT_LISTEN
    """`listen`: where mTLS clients connect."""

    admin: Address | None = DEFAULT_ADMIN
    """`admin`: dumps and debugging; `off` (None) opens no port."""

    metrics: Address | None = DEFAULT_METRICS
    """`metrics`: for Prometheus; `off` (None) opens no port."""

    health: Address | None = DEFAULT_HEALTH
    """`health`: for readiness probes; `off` (None) opens no port."""

    limits: Limits = field(default_factory=Limits)
    """`limits`: bounds of time and number."""

    hbone: HboneSettings | None = None
    """`hbone`: the port for members of the mesh that speak HBONE themselves; None opens no port."""

    reverse: ReverseSettings | None = None
    """`reverse`: the port for workloads that cannot be dialled and dial us; None opens no port."""

    trust_domain: str = ""
    """`trust_domain`: ours, for rules that do not name one; empty: not told."""

    trust_domain_aliases: tuple[str, ...] = ()
    """`trust_domain_aliases`: names that it has beside; their peers count as ours."""

    tokens: TokenSettings = field(default_factory=TokenSettings)
    """`tokens`: where ID tokens come from. The environment goes over it."""

    warnings: tuple[str, ...] = field(default=(), compare=False)
    """What may be a mistake, each FILE:LINE: FIELD: REASON, sorted by line."""


def load(path: Path) -> GatewayConfig:
    """Reads the gateway's file. Raises ConfigError if it cannot be read or has a mistake, ConfigErrors with
    all of them if it has several."""
    try:
        content = regular_files.read(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(str(path), None, "", f"cannot be read: {error.strerror or error}") from error
    return parse(content, str(path))


def parse(content: str | bytes, file: str) -> GatewayConfig:
    """Reads the content of a file called `file`; relative paths in it start from that file's folder.

    Raises ConfigError for a mistake, ConfigErrors for several: all that can be found without the others
    mended.
    """
    report = Report()
    config = GatewayConfig(routes=())
    try:
        document_ = document(content, file, report)
        config = _read(document_, Path(file).parent.absolute())
        placeholders.note(document_)
    except ConfigError as error:
        report.add(error)
    return replace(config, warnings=report.finish())


def _read(value: Value, folder: Path) -> GatewayConfig:
    top = value.mapping(tuple(field.name for field in fields(GatewayConfig) if field.name != "warnings"))
    default = GatewayConfig(routes=())
    trust = _trust_domain(top)
    can_register = "reverse" in top.values or "reverse" in top.failed
    config = GatewayConfig(
        routes=top.read_needed(
            "routes",
            lambda value: route_settings.read(value, folder, trust, can_register=can_register),
            (),
            "write routes: [] to refuse every name",
        ),
        listen=top.read("listen", lambda value: addresses(value, MAX_LISTENERS), default.listen),
        admin=top.read("admin", _address_or_off, default.admin),
        metrics=top.read("metrics", _address_or_off, default.metrics),
        health=top.read("health", _address_or_off, default.health),
        limits=top.read("limits", limit_settings.read, default.limits),
        hbone=top.read("hbone", lambda value: hbone_settings.read(value, folder, trust), None),
        reverse=top.read("reverse", lambda value: reverse_settings.read(value, folder, trust), None),
        trust_domain=trust.name,
        trust_domain_aliases=trust.aliases,
        tokens=top.read("tokens", lambda value: token_settings.read(value, folder), default.tokens),
    )
    _refuse_shared_ports(top, config)
    return config


def _trust_domain(top: Fields) -> TrustDomain:
    name, aliases = top.get("trust_domain"), top.get("trust_domain_aliases")
    if name is None and aliases is not None:
        aliases.refuse(aliases.error("needs trust_domain beside it: what they are aliases of"))
        return TrustDomain()
    domain = top.read("trust_domain", lambda value: value.parsed(_domain), "")
    found = top.read(
        "trust_domain_aliases",
        lambda value: tuple(value.each(MAX_ALIASES, lambda item: item.parsed(_domain))),
        (),
    )
    if "trust_domain" in top.failed:
        return _SOME_DOMAIN
    return TrustDomain(domain, found) if domain else TrustDomain()


def _domain(text: str) -> str:
    return SpiffeId(text, "").trust_domain


def _address_or_off(value: Value) -> Address | None:
    return None if value.word() == "off" else value.address(least_port=0)


def _refuse_shared_ports(top: Fields, config: GatewayConfig) -> None:
    """Two listeners on one address would stop the start, or a reload, half way."""
    taken = dict.fromkeys(config.listen, "listen")
    others = [("admin", config.admin), ("metrics", config.metrics), ("health", config.health)]
    others += [("hbone", address) for address in config.hbone.listen] if config.hbone else []
    others += [("reverse", address) for address in config.reverse.listen] if config.reverse else []
    for name, address in others:
        if address is None or not address.port:
            continue
        if address in taken:
            # One of the two is in the file: the defaults differ from each other.
            culprit = top.get(name) or top.need(taken[address])
            culprit.refuse(culprit.error(f"{address} is the address of both {taken[address]} and {name}"))
        taken[address] = name

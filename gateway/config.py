"""The gateway's file: what can be set, what it means, and what each setting may be.

Owned here: the fields of the file, their defaults and bounds, and that no mistake gets past the start or a
reload. What is inside `routes`, `limits`, `hbone`, `reverse` and `tokens` has a module each
(`route_settings.py` and so on); how YAML is read with its line numbers is `yaml_nodes.py`'s matter. A mistake
is a ConfigError with file, line, field and reason (exit code 78). The only I/O is reading the file itself and
the `ca` files that it names.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from gateway import hbone_settings, limit_settings, reverse_settings, route_settings, token_settings
from gateway.hbone_rules import bypasses
from gateway.hbone_settings import HboneSettings, addresses
from gateway.limit_settings import Limits
from gateway.reverse_settings import ReverseSettings
from gateway.routes import Route
from gateway.yaml_nodes import MAX_FILE_BYTES, Fields, Value, document
from shared import ports, regular_files
from shared.errors import ConfigError
from shared.identity.peer_patterns import MAX_ALIASES, TrustDomain
from shared.identity.spiffe import SpiffeId
from shared.identity.token_sources.token_settings import TokenSettings
from shared.net.address import Address

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


def load(path: Path) -> GatewayConfig:
    """Reads the gateway's file. Raises ConfigError if it cannot be read or has a mistake."""
    try:
        content = regular_files.read(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(str(path), None, "", f"cannot be read: {error.strerror or error}") from error
    return parse(content, str(path))


def warnings(config: GatewayConfig, file: str) -> list[str]:
    """What is no mistake in the file called `file`, but hardly meant: FILE:LINE: field: what, a line each."""
    found: list[str] = []
    if config.hbone is not None:
        for index, text in bypasses(config.hbone.rules):
            found.append(
                str(ConfigError(file, config.hbone.rules[index].line, f"hbone.rules[{index}]", text))
            )
    return found


def parse(content: str | bytes, file: str) -> GatewayConfig:
    """Reads the content of a file called `file`; relative paths in it start from that file's folder.

    Raises ConfigError for the first mistake found.
    """
    folder = Path(file).parent.absolute()
    top = document(content, file).mapping(tuple(field.name for field in fields(GatewayConfig)))
    default = GatewayConfig(routes=())
    listen = top.get("listen")
    limits = top.get("limits")
    hbone = top.get("hbone")
    reverse = top.get("reverse")
    trust = _trust_domain(top)
    tokens = top.get("tokens")
    config = GatewayConfig(
        routes=route_settings.read(
            top.need("routes", "write routes: [] to refuse every name"), folder, trust
        ),
        listen=addresses(listen, MAX_LISTENERS) if listen else default.listen,
        admin=_address_or_off(top.get("admin"), default.admin),
        metrics=_address_or_off(top.get("metrics"), default.metrics),
        health=_address_or_off(top.get("health"), default.health),
        limits=limit_settings.read(limits) if limits else default.limits,
        hbone=hbone_settings.read(hbone, folder, trust) if hbone else None,
        reverse=reverse_settings.read(reverse, folder, trust) if reverse else None,
        trust_domain=trust.name,
        trust_domain_aliases=trust.aliases,
        tokens=token_settings.read(tokens, folder) if tokens else default.tokens,
    )
    _refuse_unregistered(top, config)
    _refuse_shared_ports(top, config)
    return config


def _trust_domain(top: Fields) -> TrustDomain:
    name, aliases = top.get("trust_domain"), top.get("trust_domain_aliases")
    if name is None:
        if aliases:
            raise aliases.error("needs trust_domain beside it: what they are aliases of")
        return TrustDomain()
    items = aliases.items(MAX_ALIASES) if aliases else []
    return TrustDomain(name.parsed(_domain), tuple(item.parsed(_domain) for item in items))


def _domain(text: str) -> str:
    return SpiffeId(text, "").trust_domain


def _address_or_off(value: Value | None, default: Address | None) -> Address | None:
    if value is None:
        return default
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
            raise culprit.error(f"{address} is the address of both {taken[address]} and {name}")
        taken[address] = name


def _refuse_unregistered(top: Fields, config: GatewayConfig) -> None:
    """A route to workloads that nothing lets register."""
    if config.reverse is not None:
        return
    for route, item in zip(config.routes, top.need("routes").items(route_settings.MAX_ROUTES), strict=True):
        if route.reverse is not None:
            given = item.mapping(route_settings.FIELDS).need("reverse")
            raise given.error("needs a section reverse in the file, where workloads register")

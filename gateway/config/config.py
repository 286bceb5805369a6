"""hgate's file: what can be set at its top, and the reading of the whole.

A mistake is a ConfigError with file, line, field and reason (exit code 78); all mistakes of a file are
reported at once. The only I/O is reading the file and the `ca` files that it names, and checking whether
other files are there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from gateway.config import (
    cluster_settings,
    hbone_settings,
    limit_settings,
    placeholders,
    reverse_settings,
)
from gateway.config.cluster_settings import ClusterSettings
from gateway.config.hbone_settings import HboneSettings
from gateway.config.limit_settings import Limits
from gateway.config.reverse_settings import ReverseSettings
from gateway.config.route_settings import ROUTES, with_certificates
from gateway.config.sections import (
    LISTEN,
    Context,
    Section,
    Structure,
    file_table,
    read_field,
    read_fields,
    read_section,
)
from gateway.config.yaml_nodes import MAX_FILE_BYTES, Fields, Report, Value, document
from gateway.rules.routes import Route
from shared import ports, regular_files
from shared.address import Address
from shared.config.fields import setting
from shared.config.kinds import ADDRESS, OrNone, Parsed
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

_SOME_DOMAIN = TrustDomain("cluster.local")  # in place of a malformed one, so that rules can be checked


ADDRESS_OR_OFF = OrNone(ADDRESS, "off")


def _domain(text: str) -> str:
    return SpiffeId(text, "").trust_domain


def _domains(value: Value, _: Context) -> tuple[str, ...]:
    return tuple(value.each(MAX_ALIASES, lambda item: item.parsed(_domain)))


def _tokens(value: Value, context: Context) -> TokenSettings:
    return read_section(TokenSettings, value, context)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """All of hgate's file."""

    routes: tuple[Route, ...] = setting(
        ROUTES,
        (),
        "where names lead",
        "The first route that matches a name decides; a name that none matches is refused.",
        needed="write routes: [] to refuse every name",
    )
    listen: tuple[Address, ...] = setting(
        LISTEN,
        DEFAULT_LISTEN,
        "where mTLS clients connect",
        unset=" and ".join(f"`{address}`" for address in DEFAULT_LISTEN),
    )
    admin: Address | None = setting(
        ADDRESS_OR_OFF, DEFAULT_ADMIN, "port for dumps and debugging; off opens none", restart=True
    )
    metrics: Address | None = setting(
        ADDRESS_OR_OFF, DEFAULT_METRICS, "port for Prometheus; off opens none", restart=True
    )
    health: Address | None = setting(
        ADDRESS_OR_OFF, DEFAULT_HEALTH, "port for readiness and liveness probes; off opens none", restart=True
    )
    limits: Limits = setting(
        Section(Limits, limit_settings.read), Limits(), "bounds of time, number and memory"
    )
    hbone: HboneSettings | None = setting(
        Section(HboneSettings, hbone_settings.read, opens_port=True),
        None,
        "the port for members of the mesh that speak HBONE themselves",
        unset="no port",
    )
    reverse: ReverseSettings | None = setting(
        Section(ReverseSettings, reverse_settings.read, opens_port=True),
        None,
        "the port for workloads that cannot be dialled and dial hgate",
        unset="no port",
    )
    cluster: ClusterSettings | None = setting(
        Section(ClusterSettings, cluster_settings.read),
        None,
        "routes from objects of the cluster, which hgate cluster reads",
        "They come behind those of routes.",
        unset="none",
    )
    trust_domain: str = setting(
        Parsed(_domain, "name", quoted=True), "", "our trust domain, for rules that do not name one"
    )
    trust_domain_aliases: tuple[str, ...] = setting(
        Structure(_domains, "list of names"),
        (),
        "further names of our trust domain",
        "Their peers count as ours.",
        unset="none",
    )
    tokens: TokenSettings = setting(
        Section(TokenSettings, _tokens),
        TokenSettings(),
        "where ID tokens come from",
        "Environment variables go over it; hbone reads the same variables.",
        restart=True,
    )
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """What may be a mistake, each FILE:LINE: FIELD: REASON, sorted by line."""
    awaits_cluster: bool = field(default=False, compare=False)
    """Whether the cluster's routes are wanted and not there yet."""

    def with_cluster(self, routes: tuple[Route, ...] | None) -> GatewayConfig:
        """The same with the routes that the cluster's objects ask for behind its own; None: they are not
        known yet. Without an HBONE port there are no CONNECTs for them to take."""
        usable = (route for route in routes or () if route.takes_names or self.hbone is not None)
        return replace(self, routes=(*self.routes, *usable), awaits_cluster=routes is None)


def load(path: Path) -> GatewayConfig:
    """Reads hgate's file. Raises ConfigError if it cannot be read or has a mistake, ConfigErrors with
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
    top = value.mapping(tuple(file_table(GatewayConfig)))
    trust = _trust_domain(top)
    known = {"trust_domain": trust.name, "trust_domain_aliases": trust.aliases}
    config = GatewayConfig(**read_fields(GatewayConfig, top, Context(folder, trust), known))
    if config.hbone is not None:
        config = replace(config, routes=with_certificates(config.routes, config.hbone.certificates))
    _refuse_shared_ports(top, config)
    return config


def _trust_domain(top: Fields) -> TrustDomain:
    name, aliases = top.get("trust_domain"), top.get("trust_domain_aliases")
    if name is None and aliases is not None:
        aliases.refuse(aliases.error("needs trust_domain beside it: what they are aliases of"))
        return TrustDomain()
    table = file_table(GatewayConfig)
    domain, found = (
        read_field(top, name, table[name], Context()) for name in ("trust_domain", "trust_domain_aliases")
    )
    if "trust_domain" in top.failed:
        return _SOME_DOMAIN
    return TrustDomain(domain, found) if domain else TrustDomain()


def _refuse_shared_ports(top: Fields, config: GatewayConfig) -> None:
    """Two listeners on one address would stop the start, or a reload, half way."""
    taken = dict.fromkeys(config.listen, "listen")
    others = [("admin", config.admin), ("metrics", config.metrics), ("health", config.health)]
    others += [("hbone", address) for address in config.hbone.listen] if config.hbone else []
    others += [("hbone", address) for address in config.hbone.tunnel_listen] if config.hbone else []
    others += [("reverse", address) for address in config.reverse.listen] if config.reverse else []
    for name, address in others:
        if address is None or not address.port:
            continue
        if address in taken:
            # One of the two is in the file: the defaults differ from each other.
            culprit = top.get(name) or top.need(taken[address])
            culprit.refuse(culprit.error(f"{address} is the address of both {taken[address]} and {name}"))
        taken[address] = name

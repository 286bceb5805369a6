"""Settings of krun about egress: the app's connections into the mesh by way of hgate's HBONE port."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.config.capture_settings import CaptureSettings
from agent.config.target_pattern import TargetPattern
from agent.config.variables import PEER_PATTERNS, loopback
from shared import ports
from shared.address import Address, is_own_machine
from shared.config.fields import Environment, setting
from shared.config.kinds import NONE, Count, Duration, FilePath, List, OrNone, Parsed, Switch, Text, target
from shared.credentials.token_sources.token_settings import DEFAULT_METADATA_HOST
from shared.errors import DeniedError, UsageError

MAX_PORTS = 100
"""Local ports: each is a socket that listens."""

MAX_PATTERNS = 200
"""Of targets: each is compared with what a client of the proxy asks for."""

MAX_CONNECTIONS = 100_000
MAX_TIMEOUT_S = 3600.0

LOOPBACK = "127.0.0.1"

DEFAULT_PROXY = Address(LOOPBACK, ports.HTTP_PROXY)

_REASON = "whoever reaches it speaks with the workload's certificate"


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """A port of this machine, and where its connections lead."""

    listen: Address
    target: Address

    def __str__(self) -> str:
        return f"{self.listen}={self.target}"

    @classmethod
    def parse(cls, text: str) -> LocalTarget:
        """Reads PORT=HOST:PORT or ADDRESS:PORT=HOST:PORT. Raises ValueError with the reason."""
        place, equals, told = text.partition("=")
        if not equals:
            raise ValueError("must be PORT=HOST:PORT, or ADDRESS:PORT=HOST:PORT")
        place = place.strip()
        listen = loopback(_REASON)(f"{LOOPBACK}:{place}" if place.isdigit() else place)
        return cls(listen, plain_name(target(told.strip())))


def plain_name(address: Address) -> Address:
    """The same without a dot at the name's end, which no gateway needs: it follows no search list."""
    return Address(address.host.removesuffix("."), address.port)


_DEFAULT_PORTS = {"https": ports.HTTPS, "http": 80}


@dataclass(frozen=True, slots=True)
class GatewayUrl:
    """Where a front end takes POSTs that carry connections to the gateway."""

    scheme: str
    """https, or http for HTTP/2 without TLS (h2c)."""

    address: Address
    path: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """HOST, with the port unless it is the scheme's own."""
        return str(self.address).removesuffix(f":{_DEFAULT_PORTS[self.scheme]}")

    @classmethod
    def parse(cls, text: str) -> GatewayUrl:
        """Reads https://HOST[:PORT]/PATH, or http. Raises ValueError with the reason."""
        scheme, _, rest = text.partition("://")
        place, slash, path = rest.partition("/")
        if scheme not in _DEFAULT_PORTS:
            raise ValueError("the scheme must be https or http")
        if not path and "@" not in place:
            raise ValueError(f"no path: hgate takes {scheme}://{place}/_hbone/{ports.HBONE}")
        if not text.isascii() or not text.isprintable() or " " in text or "#" in text or "@" in place:
            raise ValueError("no blanks, #, user or characters beyond ASCII: write %XX")
        return cls(scheme, plain_name(target(place, _DEFAULT_PORTS[scheme])), slash + path)


def _gateway(text: str) -> Address | GatewayUrl:
    return GatewayUrl.parse(text) if "://" in text else target(text, ports.HBONE)


@dataclass(frozen=True, slots=True)
class EgressSettings:
    """All that HBONE_EGRESS* set."""

    local: tuple[LocalTarget, ...] = setting(
        List(LocalTarget.parse, MAX_PORTS, "PORT=HOST:PORT or ADDRESS:PORT=HOST:PORT"),
        (),
        "local ports that lead to targets in the mesh: PORT=HOST:PORT, separated by commas",
        "Each connection goes through the gateway of HBONE_EGRESS_GATEWAY, which looks HOST up. krun listens "
        "on 127.0.0.1, or on the loopback ADDRESS of ADDRESS:PORT=HOST:PORT.",
        unset="none",
        variable="HBONE_EGRESS",
    )
    gateway: Address | GatewayUrl | None = setting(
        Parsed(_gateway, "HOST:PORT, HOST or a URL"),
        None,
        "HOST:PORT of the HBONE port of hgate, or of another gateway of the mesh, that leads there; or the "
        "URL of hgate's tunnel port behind a front end",
        f"The port is {ports.HBONE} if none is given. krun shows it the workload's certificate. Where only "
        f"HTTPS gets out, https://HOST/_hbone/{ports.HBONE} is reached by POST over HTTP/2, which carries "
        "the connection to hgate; with http the POST has no TLS of its own.",
        unset="none",
        variable="HBONE_EGRESS_GATEWAY",
    )
    ca: Path | None = setting(
        FilePath(),
        None,
        "PEM file of the certificates to trust for the URL of HBONE_EGRESS_GATEWAY",
        unset="the system's",
        variable="HBONE_EGRESS_CA",
    )
    audience: str = setting(
        Text(),
        "",
        "audience of the ID token that each POST to the URL of HBONE_EGRESS_GATEWAY has",
        "From the metadata server, for a front end that lets nobody in without one. It goes nowhere else.",
        unset="no token",
        variable="HBONE_EGRESS_AUDIENCE",
    )
    metadata_host: str = DEFAULT_METADATA_HOST
    peers: tuple[str, ...] = setting(
        PEER_PATTERNS,
        (),
        "SPIFFE ID patterns of that gateway, separated by commas",
        unset="the own trust domain",
        variable="HBONE_EGRESS_PEER",
    )
    """Empty: the trust domain of our certificate."""

    proxy: Address | None = setting(
        OrNone(Parsed(loopback(_REASON), "loopback HOST:PORT")),
        DEFAULT_PROXY,
        f"loopback address of the HTTP and SOCKS5 proxy into the mesh, {NONE} for none",
        "It is there only with HBONE_EGRESS_ALLOW.",
        variable="HBONE_EGRESS_PROXY",
    )
    allow: tuple[TargetPattern, ...] = setting(
        List(TargetPattern.parse, MAX_PATTERNS, "HOST:PORT patterns"),
        (),
        "what the proxy leads to: HOST:PORT patterns such as *.prod.svc.cluster.local:5432, with commas",
        "HOST is a glob on names (* is one label, ** any number of labels), an address or a network, or a "
        "lone * for all; PORT is a number or *. The gateway's own rules judge, too.",
        unset="nothing, and there is no proxy",
        variable="HBONE_EGRESS_ALLOW",
    )
    deny: tuple[TargetPattern, ...] = setting(
        List(TargetPattern.parse, MAX_PATTERNS, "HOST:PORT patterns"),
        (),
        "what neither the proxy nor a local port leads to, whatever HBONE_EGRESS_ALLOW says",
        unset="nothing",
        variable="HBONE_EGRESS_DENY",
    )
    app_proxy: bool = setting(
        Switch(),
        False,
        "whether HTTP_PROXY of the app leads to the proxy of HBONE_EGRESS_PROXY",
        "The app's plain requests to all other hosts would be refused there: put these into NO_PROXY.",
        variable="HBONE_EGRESS_APP_PROXY",
    )
    max_connections: int = setting(
        Count(1, MAX_CONNECTIONS),
        1000,
        "connections to local ports and the proxy at once",
        "More are reset. Each is a file descriptor, and a tunnel at the gateway.",
        variable="HBONE_EGRESS_MAX_CONNECTIONS",
    )
    timeout_s: float = setting(
        Duration(0.001, MAX_TIMEOUT_S),
        20.0,
        "time the gateway has to connect a target",
        "What krun needs for a connection to the gateway counts, too. hgate gives a target 10 s.",
        variable="HBONE_EGRESS_TIMEOUT",
    )

    @property
    def has_proxy(self) -> bool:
        """Whether there is a proxy."""
        return self.proxy is not None and bool(self.allow)

    def check_local(self, wanted: Address) -> None:
        """Raises DeniedError if no local port may lead to `wanted`."""
        denied = _first(self.deny, wanted, deny=True)
        if denied is not None:
            raise DeniedError(f"{wanted} denied: HBONE_EGRESS_DENY has {denied}")

    def check_proxy(self, wanted: Address) -> None:
        """Raises DeniedError if the proxy may not lead to `wanted`."""
        self.check_local(wanted)
        if _first(self.allow, wanted, deny=False) is None:
            raise DeniedError(f"{wanted} denied: HBONE_EGRESS_ALLOW does not have it")


def _check_front_end(settings: EgressSettings) -> None:
    """Raises UsageError where a setting has nothing to be about, or would show a token to onlookers."""
    url = settings.gateway
    for name, value in (("HBONE_EGRESS_CA", settings.ca), ("HBONE_EGRESS_AUDIENCE", settings.audience)):
        if not value:
            continue
        if not isinstance(url, GatewayUrl):
            raise UsageError(f"{name} is set, and HBONE_EGRESS_GATEWAY is no URL, which it would be for")
        if url.scheme == "http" and not (
            name == "HBONE_EGRESS_AUDIENCE" and is_own_machine(url.address.host)
        ):
            raise UsageError(f"{name} is set, and HBONE_EGRESS_GATEWAY={url} has no TLS: write https")


def _first(patterns: Sequence[TargetPattern], wanted: Address, *, deny: bool) -> TargetPattern | None:
    return next((pattern for pattern in patterns if pattern.matches(wanted, deny=deny)), None)


def read(read: Environment, own_domain: tuple[str, ...], capture: CaptureSettings) -> EgressSettings | None:
    """The settings that `read` finds; None if neither a local port nor a proxy is asked for. `own_domain` has
    the patterns of our own trust domain, if it is set. Raises UsageError."""
    settings = EgressSettings(
        **{"peers": own_domain, "metadata_host": capture.metadata_host} | read.given(EgressSettings)
    )
    if not (settings.local or settings.has_proxy):
        if settings.gateway is not None:
            raise UsageError(
                "HBONE_EGRESS_GATEWAY is set, but neither HBONE_EGRESS nor HBONE_EGRESS_ALLOW: what is to go "
                "there?"
            )
        if settings.app_proxy:
            raise UsageError(
                "HBONE_EGRESS_APP_PROXY is set, and there is no proxy without HBONE_EGRESS_ALLOW"
            )
        return None
    if settings.gateway is None:
        name = "HBONE_EGRESS" if settings.local else "HBONE_EGRESS_ALLOW"
        raise UsageError(f"{name} is set, but not HBONE_EGRESS_GATEWAY: which gateway leads there?")
    _check_front_end(settings)
    for local in settings.local:
        try:
            settings.check_local(local.target)
        except DeniedError as error:
            raise UsageError(f"invalid HBONE_EGRESS={local} ({error})") from error
    if len({local.listen for local in settings.local if local.listen.port}) < len(
        [local for local in settings.local if local.listen.port]
    ):
        raise UsageError("invalid HBONE_EGRESS (one port leads to two targets)")
    if settings.app_proxy:
        if not settings.has_proxy:
            raise UsageError(
                "HBONE_EGRESS_APP_PROXY is set, and there is no proxy without HBONE_EGRESS_ALLOW"
            )
        if capture.services is not None or capture.mode == "proxy":
            other = "HBONE_SERVICES" if capture.services is not None else "HBONE_CAPTURE=proxy"
            raise UsageError(
                f"HBONE_EGRESS_APP_PROXY and {other}: the app has one HTTP_PROXY, so leave one out"
            )
    return settings

"""The gateway's file: what can be set, what it means, and what each setting may be.

Owned here: the fields of the file, their defaults and bounds, and that no mistake gets past the start or a
reload. How YAML is read with its line numbers is `yaml_nodes.py`'s matter, what a route then does
`routes.py`'s. A mistake is a ConfigError with file, line, field and reason (exit code 78). The only I/O is
reading the file itself and the `ca` files that it names.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypedDict

from gateway import hbone_settings, reverse_settings
from gateway.hbone_settings import HboneSettings, addresses, or_off
from gateway.reverse_settings import ReverseSettings
from gateway.routes import DEFAULT_AUTHORITY, Route, TokenRule, compile_glob
from gateway.templates import Template, TunnelUrl, read_target
from gateway.yaml_nodes import MAX_FILE_BYTES, Fields, Value, document
from shared import ports
from shared.errors import ConfigError
from shared.net.address import Address
from shared.net.mesh_tls import MeshIdentity
from shared.net.pool_limits import PoolLimits
from shared.wire.session import SessionLimits

DEFAULT_LISTEN = (Address("0.0.0.0", ports.SNI_ISTIO), Address("0.0.0.0", ports.SNI))
"""Istio's customary gateway port and the original's."""

DEFAULT_ADMIN = Address("127.0.0.1", ports.ADMIN)
"""Dumps and debugging are for people on the machine only."""

DEFAULT_METRICS = Address("0.0.0.0", ports.METRICS)
"""Where Istio's scrape configurations look."""

DEFAULT_HEALTH = Address("0.0.0.0", ports.HEALTH)
"""The kubelet asks from outside the pod."""

MAX_ROUTES = 1000
"""An unknown name is compared with every route, 0.1 to 0.4 µs each, before it is refused."""

MAX_LISTENERS = 16
"""Addresses in `listen`; each is a socket for as long as the process runs."""

MAX_TIMEOUT_S = 3600.0
"""The longest time that makes sense: Cloud Run ends any request after an hour."""

MIN_TIMEOUT_S = 0.001
"""A time limit of zero would refuse everything; only a drain may be instant."""

MAX_CONNECTIONS = 1_000_000
"""More than the ports and file descriptors of one machine serve: a slip of the finger."""

MAX_PIPES = 10_000
"""Some 10 GiB that the kernel may have to keep for slow readers."""

MAX_STREAMS = 10_000
"""The same for the streams of one connection: one lost packet would hold up all of them."""

LEAST_WINDOW_BYTES = 65535
"""RFC 9113 section 6.9.2: a peer may send as much before it has seen our SETTINGS."""

MAX_WINDOW_BYTES = (1 << 31) - 1
"""RFC 9113 section 6.9.1."""

LEAST_BUFFERED_BYTES = 1 << 20
"""Less would be used up by the first tunnel whose client reads slowly."""

MAX_BUFFERED_BYTES = 1 << 50
"""More than any machine has."""
MAX_RETRIES = 20
"""After 20 pauses a minute has gone by on average: more is no patience, but a loop."""
MAX_UPSTREAM_CONNECTIONS = 10_000
"""The same for the connections to one upstream, each of which is a file descriptor."""

MAX_UPSTREAM_S = 7 * 86400.0
"""A week: no connection of a cloud lives as long."""

MIN_INTERVAL_S = 1.0
"""What is done to every upstream in such short intervals is a flood."""

_POOL = PoolLimits()

_IDENTITY_FIELDS = ("identity", "peer", "sni")
_TUNNEL_ONLY_FIELDS = ("connect", "ca", "token", "method", "authority", *_IDENTITY_FIELDS)
_ROUTE_LIMITS = ("max_connections", "max_tunnel_lifetime")
_KINDS = ("tunnel", "forward", "reverse")
_ROUTE_FIELDS = ("host", *_KINDS, "alpn", *_TUNNEL_ONLY_FIELDS, *_ROUTE_LIMITS)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of time and number."""

    hello_timeout_s: float = 10.0
    """`hello_timeout`: for a whole ClientHello, from the accepted connection on. A hello is two packets, so
    this allows for their loss, and bounds what an idle or slow client can hold."""

    connect_timeout_s: float = 10.0
    """`connect_timeout`: for TCP and TLS to an upstream, each attempt. Envoy's and ztunnel's value."""

    response_timeout_s: float = 30.0
    """`response_timeout`: from asking for a stream to the 200, all retries and the pauses before them
    included. Covers a Cloud Run cold start."""

    drain_delay_s: float | None = None
    """`drain_delay`: how long connections are accepted after SIGTERM, while readiness has fallen already, for
    Kubernetes' endpoints and load balancers take seconds to notice. None: 5 s if somebody has asked for
    readiness in the last minute, else 0, as nobody needs the time."""

    drain_timeout_s: float = 20.0
    """`drain_timeout`: for open tunnels to end once no connection is accepted any more; 0 ends them at once.
    With the delay before it leaves 5 of the 30 seconds between Kubernetes' SIGTERM and SIGKILL."""

    max_connections: int = 10_000
    """Downstream connections open at once; more are refused. Each holds two sockets' worth of buffers, and
    one file descriptor here plus its share of an upstream connection."""

    # Of the HTTP/2 connections to an upstream; shared/net/pool_limits.py explains the defaults. With several
    # workers each has its own.

    streams_per_connection: int = _POOL.streams_per_connection
    """Tunnels on one HTTP/2 connection to an upstream before another is opened; the upstream may allow
    fewer."""

    connections_per_origin: int = _POOL.connections_per_origin
    """HTTP/2 connections to one upstream; when all are full, new tunnels wait for room."""

    max_waiting: int = _POOL.max_waiting
    """Tunnels that wait for a connection to one upstream, or for room on one; one more is refused."""

    upstream_idle_timeout_s: float = _POOL.idle_timeout_s
    """`upstream_idle_timeout`: how long an HTTP/2 connection without tunnels is kept."""

    max_connection_age_s: float = _POOL.max_age_s
    """`max_connection_age`: how long an HTTP/2 connection takes new tunnels, less up to a tenth by chance; it
    ends with its last tunnel. 0: for ever."""

    ping_interval_s: float = _POOL.ping_interval_s
    """`ping_interval`: an upstream with open tunnels that has been silent so long is asked for a sign of
    life. Google's front ends do not like it much more often. 0: never."""

    resolve_interval_s: float = _POOL.resolve_interval_s
    """`resolve_interval`: how often the name of an upstream is looked up again while there are connections to
    it; new tunnels go to none whose address is no longer there. 0: never."""

    def pool(self) -> PoolLimits:
        """Those of the HTTP/2 connections."""
        return PoolLimits(
            connect_timeout_s=self.connect_timeout_s,
            streams_per_connection=self.streams_per_connection,
            connections_per_origin=self.connections_per_origin,
            max_waiting=self.max_waiting,
            idle_timeout_s=self.upstream_idle_timeout_s,
            max_age_s=self.max_connection_age_s,
            ping_interval_s=self.ping_interval_s,
            resolve_interval_s=self.resolve_interval_s,
            session=SessionLimits(
                stream_window_bytes=self.stream_window_bytes,
                connection_window_bytes=self.connection_window_bytes,
            ),
        )

    max_connections_per_source: int = 0
    """`max_connections_per_source`: of those, from one address; more are refused. 0: as many as in all,
    because a load balancer, or all pods of a node behind its NAT, come from one address. Where clients have
    addresses of their own, some hundreds keep one of them from taking all."""

    max_connections_per_route: int = 0
    """`max_connections_per_route`: of those, on one route that has no `max_connections` itself; more are
    refused once their hello is read. 0: as many as in all, for a gateway with one route should serve it with
    all it has."""

    idle_timeout_s: float = 3600.0
    """`idle_timeout`: an open tunnel without a byte either way for so long is reset; 0: never. Envoy's
    `tcp_proxy` has the same default; it only has to be longer than whatever probes sleepy connections."""

    max_tunnel_lifetime_s: float = 3300.0
    """`max_tunnel_lifetime`: of a tunnel with POST, less up to 10 % by chance; 0: for ever. 55 minutes,
    because Cloud Run resets any request after an hour at most; a service whose request timeout is shorter (by
    default it is 5 minutes) needs a route with less. Ended at rest if possible (`tunnel_clock`)."""

    max_buffered_bytes: int | None = None
    """`max_buffered`: held for all peers together. Above it connections are refused, 10 % above it the
    tunnels that hold most are reset; 0: no bound. None: half the container's, or else the machine's, memory.
    """

    stream_window_bytes: int = SessionLimits().stream_window_bytes
    """`stream_window`: what a service may send on one tunnel before the client has taken it. 1 MiB moves
    100 MB/s at 10 ms; a tunnel whose client does not read holds so much."""

    connection_window_bytes: int = SessionLimits().connection_window_bytes
    """`connection_window`: the same for all tunnels of one HTTP/2 connection; 16 stalled ones fill it."""
    max_retries: int = 5
    """`max_retries`: times that a tunnel request is sent again before the client is refused, within
    `response_timeout`; 0: never. `shared/net/retry.py` has when, and the reason for the number."""

    retry_budget_percent: int = 20
    """`retry_budget_percent`: of the requests that wait for an origin's answer so many in a hundred may be
    retries after a 429, 502 or 503, at least 10 in all: retries must not hold a service down. As Envoy's."""
    splice_pipes: int = 64
    """`splice_pipes`: pipes that forwarded connections may hold at once, in each worker; only one whose
    reader is slower than its sender holds any for longer than a moment. Beyond it bytes are copied; 0 copies
    all. 64 of 1 MiB are what Linux grants a user without privileges (pipe-user-pages-soft)."""


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

    limits: Limits = Limits()
    """`limits`: bounds of time and number."""

    hbone: HboneSettings | None = None
    """`hbone`: the port for members of the mesh that speak HBONE themselves; None opens no port."""

    reverse: ReverseSettings | None = None
    """`reverse`: the port for workloads that cannot be dialled and dial us; None opens no port."""


def load(path: Path) -> GatewayConfig:
    """Reads the gateway's file. Raises ConfigError if it cannot be read or has a mistake."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(str(path), None, "", f"cannot be read: {error.strerror or error}") from error
    return parse(content, str(path))


def parse(content: str | bytes, file: str) -> GatewayConfig:
    """Reads the content of a file called `file`; relative paths in it start from that file's folder.

    Raises ConfigError for the first mistake found.
    """
    folder = Path(file).parent.absolute()
    files = _NamedFiles(folder)
    top = document(content, file).mapping(tuple(field.name for field in fields(GatewayConfig)))
    default = GatewayConfig(routes=())
    listen = top.get("listen")
    limits = top.get("limits")
    hbone = top.get("hbone")
    reverse = top.get("reverse")
    config = GatewayConfig(
        routes=_routes(top.need("routes", "write routes: [] to refuse every name"), files),
        listen=addresses(listen, MAX_LISTENERS) if listen else default.listen,
        admin=_address_or_off(top.get("admin"), default.admin),
        metrics=_address_or_off(top.get("metrics"), default.metrics),
        health=_address_or_off(top.get("health"), default.health),
        limits=_limits(limits) if limits else default.limits,
        hbone=hbone_settings.read(hbone, folder) if hbone else None,
        reverse=reverse_settings.read(reverse, folder) if reverse else None,
    )
    _refuse_unregistered(top, config)
    _refuse_shared_ports(top, config)
    return config


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
    for route, item in zip(config.routes, top.need("routes").items(MAX_ROUTES), strict=True):
        if route.reverse is not None:
            given = item.mapping(_ROUTE_FIELDS).need("reverse")
            raise given.error("needs a section reverse in the file, where workloads register")


def _limits(value: Value) -> Limits:
    default = Limits()
    given = value.mapping(
        tuple(field.name.removesuffix("_s").removesuffix("_bytes") for field in fields(Limits))
    )

    def seconds(
        name: str, default_s: float, least_s: float = MIN_TIMEOUT_S, most_s: float = MAX_TIMEOUT_S
    ) -> float:
        found = given.get(name)
        return found.duration(least_s, most_s) if found else default_s

    def interval(name: str, default_s: float) -> float:
        found = given.get(name)
        if found is None:
            return default_s
        wanted_s = found.duration(0.0, MAX_UPSTREAM_S)
        if 0 < wanted_s < MIN_INTERVAL_S:
            raise found.error(f"must be 0, which turns it off, or {MIN_INTERVAL_S:g}s at least")
        return wanted_s

    def count(name: str, default_count: int, most: int, least: int = 1) -> int:
        found = given.get(name)
        return found.integer(least, most) if found else default_count

    def size(name: str, default_bytes: int) -> int:
        found = given.get(name)
        return found.size(LEAST_WINDOW_BYTES, MAX_WINDOW_BYTES) if found else default_bytes

    stream_window = size("stream_window", default.stream_window_bytes)
    connection_window = size("connection_window", default.connection_window_bytes)
    if connection_window < stream_window:
        name = "connection_window" if given.get("connection_window") else "stream_window"
        raise given.need(name).error("connection_window is smaller than stream_window")
    idle, lifetime = given.get("idle_timeout"), given.get("max_tunnel_lifetime")
    buffered = given.get("max_buffered")
    return Limits(
        hello_timeout_s=seconds("hello_timeout", default.hello_timeout_s),
        connect_timeout_s=seconds("connect_timeout", default.connect_timeout_s),
        response_timeout_s=seconds("response_timeout", default.response_timeout_s),
        drain_delay_s=delay.duration(0.0, MAX_TIMEOUT_S) if (delay := given.get("drain_delay")) else None,
        drain_timeout_s=seconds("drain_timeout", default.drain_timeout_s, least_s=0.0),
        max_connections=count("max_connections", default.max_connections, MAX_CONNECTIONS),
        max_connections_per_source=count("max_connections_per_source", 0, MAX_CONNECTIONS, least=0),
        max_connections_per_route=count("max_connections_per_route", 0, MAX_CONNECTIONS, least=0),
        idle_timeout_s=or_off(idle) if idle else default.idle_timeout_s,
        max_tunnel_lifetime_s=or_off(lifetime) if lifetime else default.max_tunnel_lifetime_s,
        max_buffered_bytes=_buffered(buffered) if buffered else None,
        stream_window_bytes=stream_window,
        connection_window_bytes=connection_window,
        streams_per_connection=count("streams_per_connection", default.streams_per_connection, MAX_STREAMS),
        max_retries=count("max_retries", default.max_retries, MAX_RETRIES, least=0),
        retry_budget_percent=count("retry_budget_percent", default.retry_budget_percent, 100, least=0),
        splice_pipes=count("splice_pipes", default.splice_pipes, MAX_PIPES, least=0),
        connections_per_origin=count(
            "connections_per_origin", default.connections_per_origin, MAX_UPSTREAM_CONNECTIONS
        ),
        max_waiting=count("max_waiting", default.max_waiting, MAX_CONNECTIONS),
        upstream_idle_timeout_s=seconds(
            "upstream_idle_timeout", default.upstream_idle_timeout_s, most_s=MAX_UPSTREAM_S
        ),
        max_connection_age_s=interval("max_connection_age", default.max_connection_age_s),
        ping_interval_s=interval("ping_interval", default.ping_interval_s),
        resolve_interval_s=interval("resolve_interval", default.resolve_interval_s),
    )


def _buffered(value: Value) -> int:
    return 0 if value.word() == "0" else value.size(LEAST_BUFFERED_BYTES, MAX_BUFFERED_BYTES)


def _routes(value: Value, files: _NamedFiles) -> tuple[Route, ...]:
    routes: list[Route] = []
    places: dict[str, int] = {}
    for index, item in enumerate(value.items(MAX_ROUTES)):
        route = _route(item, files)
        if route.host in places:
            raise item.error(f"is never reached: routes[{places[route.host]}] has the same host")
        places[route.host] = index
        routes.append(route)
    return tuple(routes)


def _route(value: Value, files: _NamedFiles) -> Route:
    given = value.mapping(_ROUTE_FIELDS)
    host = given.need("host")
    host.parsed(compile_glob)
    glob = host.text().lower()
    kind, alpn = given.one_of(_KINDS), given.get("alpn")
    if alpn and kind != "forward":
        raise alpn.error("has a meaning only beside forward")
    if kind != "tunnel":
        for name in _TUNNEL_ONLY_FIELDS:
            if extra := given.get(name):
                raise extra.error(f"has no meaning beside {kind}, only beside tunnel")
        if kind == "reverse":
            reverse = _registered(given.need("reverse"))
            return Route(glob, reverse=reverse, line=value.line, **_route_limits(given))
        return Route(
            glob,
            forward=given.need("forward").address(least_port=1),
            alpn="any" if alpn and alpn.choice(("istio", "any")) == "any" else "istio",
            line=value.line,
            **_route_limits(given),
        )
    method = given.get("method")
    connects = method is not None and method.choice(("POST", "CONNECT")) == "CONNECT"
    url = given.need("tunnel").parsed(TunnelUrl.parse_origin if connects else TunnelUrl.parse)
    connect, token, authority = given.get("connect"), given.get("token"), given.get("authority")
    if authority and not connects:
        raise authority.error("has a meaning only beside method: CONNECT, which it is the target of")
    trust = _trust(given, url, files)
    return Route(
        glob,
        tunnel=url,
        connect=connect.address(least_port=1) if connect else None,
        ca=trust if isinstance(trust, Path) else None,
        identity=trust if isinstance(trust, MeshIdentity) else None,
        token=_token(token, files) if token else _default_token(url, trust),
        method="CONNECT" if connects else "POST",
        authority=authority.parsed(read_target) if authority else DEFAULT_AUTHORITY,
        line=value.line,
        **_route_limits(given),
    )


class _RouteLimits(TypedDict):
    max_connections: int | None
    max_tunnel_lifetime_s: float | None


def _route_limits(given: Fields) -> _RouteLimits:
    most, lifetime = (given.get(name) for name in _ROUTE_LIMITS)
    return {
        "max_connections": most.integer(0, MAX_CONNECTIONS) if most else None,
        "max_tunnel_lifetime_s": or_off(lifetime) if lifetime else None,
    }


def _registered(value: Value) -> TunnelUrl:
    if value.word() == "true":
        return TunnelUrl.parse_registered("{host}")
    return value.parsed(TunnelUrl.parse_registered)


def _trust(given: Fields, url: TunnelUrl, files: _NamedFiles) -> Path | MeshIdentity | None:
    """What the outer TLS trusts: a CA file, or the roots of the identity that it shows."""
    ca, identity = given.get("ca"), given.get("identity")
    for name in ("ca", *_IDENTITY_FIELDS):
        if url.scheme != "https" and (extra := given.get(name)):
            raise extra.error("has no meaning for an http tunnel, which has no TLS")
    if identity is None:
        for name in _IDENTITY_FIELDS:
            if extra := given.get(name):
                raise extra.error("has a meaning only beside identity")
        return files.ca(ca) if ca else None
    if ca:
        raise ca.error("cannot stand beside identity, whose folder has the roots")
    return hbone_settings.mesh_identity(identity, given.get("peer"), given.get("sni"), files.folder)


def _default_token(url: TunnelUrl, trust: object) -> TokenRule:
    # Cloud Run wants the service's URL as the audience; in the clear no token goes out unasked, and the mesh
    # has certificates instead.
    wanted = url.scheme == "https" and not isinstance(trust, MeshIdentity)
    return TokenRule(audience=url.origin()) if wanted else TokenRule()


def _token(value: Value, files: _NamedFiles) -> TokenRule:
    if not value.is_mapping:
        # What stands here instead may be a token: it is not repeated.
        if value.word() != "none":
            raise value.error("must be none, {audience: TEMPLATE} or {file: PATH}")
        return TokenRule()
    given = value.mapping(("audience", "file"))
    if given.one_of(("audience", "file")) == "file":
        return TokenRule(file=files.token(given.need("file")))
    return TokenRule(audience=given.need("audience").parsed(Template.parse))


class _NamedFiles:
    """The files that a file of settings names, relative to its own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Many routes share one CA file: reading a system's bundle takes 10 ms each time.
        self._good_cas: set[Path] = set()

    def token(self, value: Value) -> Path:
        """The path of a token file, which need not exist yet."""
        return self.folder / value.text()

    def ca(self, value: Value) -> Path:
        """The path of a CA file, once it is known to hold certificates."""
        path = self.folder / value.text()
        if path in self._good_cas:
            return path
        try:
            if not path.is_file():
                raise value.error(f"{path} is no file")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(cafile=path)
        except ssl.SSLError as error:
            raise value.error(f"{path} holds no PEM certificates that can be read") from error
        except OSError as error:
            raise value.error(f"{path} cannot be read: {error.strerror or error}") from error
        if not context.cert_store_stats()["x509"]:
            raise value.error(f"{path} holds no certificate")
        self._good_cas.add(path)
        return path

"""The routing table: which destinations the gateway serves, and where each of them goes. No I/O.

A destination comes from a client that has proved nothing. So a value taken from it can only be a part of a
host name, a path or an audience, never an end of one: `{service}`, `{namespace}` and `{subset}` are single
DNS labels, the first two only of a name that is SERVICE.NAMESPACE.svc, `{port}` is a number, `{host}` a host
name and no IP address, and an empty one is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from gateway.rules.templates import (
    DEFAULT_PORTS,
    PLACEHOLDERS,
    Template,
    TunnelUrl,
    is_port,
    shown,
)
from shared import ports
from shared.address import MAX_PORT, Address, check_host_name
from shared.errors import NoRouteError
from shared.name_globs import ANY_LABEL, check_glob, compile_glob
from shared.net.tls.mesh_tls import MeshIdentity
from shared.tls import istio_sni
from shared.tls.istio_sni import Destination

MAX_CACHED_TARGETS = 4096
"""Targets kept by destination, some 2.5 MiB. Only names that match a route are kept, so others cannot
push them out; when the table is full it starts anew."""

_STAND_IN = dict.fromkeys(PLACEHOLDERS, "x") | {"port": "1"}
"""For what a client's name would fill."""

DEFAULT_AUTHORITY = Template.parse("{host}:{port}")
"""What a CONNECT asks for: the destination itself."""

Method = Literal["POST", "CONNECT"]
Alpn = Literal["istio", "any"]
FirstFlight = Literal["with_request", "after_answer"]
TokenKind = Literal["none", "audience", "file"]
Inner = Literal["hbone", "tls", "none"]

_INSIDE = {
    "hbone": "HBONE inside HBONE, which krun ends at 15008",
    "tls": "the client's own mTLS, which the mTLS end at 15003 ends",
    "none": "plain bytes, inside hgate's own mTLS, which the mTLS end at 15003 ends",
}

# Checked before lower(), which turns some other letters into ASCII ones.
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,63}")


@dataclass(frozen=True, slots=True)
class TokenRule:
    """Which token goes with a tunnel request; none of the fields set: no token."""

    audience: Template | None = None
    """An ID token for this audience is minted; of the token in `file` it is demanded."""

    file: Path | None = None
    """The token is in this file, which may appear and change at any time."""

    service_account: str = ""
    """Beside `audience`: the token is this account's, by impersonation; empty: as `tokens` has it. A fixed
    text: nothing that a client says chooses an account."""


@dataclass(frozen=True, slots=True)
class Route:
    """One rule of the table: one of `tunnel`, `forward`, `reverse` and `to_service` is set."""

    host: str
    """A glob on the destination's host: `*` is a label or a part of one, `**` one or more labels."""

    tunnel: TunnelUrl | None = None
    """Carry the connection in a tunnel request to this URL."""

    forward: Address | None = None
    """Carry the connection as it is, over TCP to this address."""

    reverse: TunnelUrl | None = None
    """Carry it in a tunnel request to a workload that has dialled us and registered this URL's host."""

    to_service: bool = False
    """Carry it as it is to an endpoint of the cluster's Service that the destination names."""

    alpn: Alpn = "istio"
    """Whom a forward lets in by an Istio name: clients that offer one of Istio's ALPN names, or anybody."""

    connect: Address | None = None
    """Dial here instead of the tunnel URL's host."""

    ca: Path | None = None
    """PEM file with the certificates to trust for the outer TLS; None: the system's."""

    token: TokenRule = TokenRule()
    """The token of the tunnel request."""

    method: Method = "POST"
    """The tunnel request's method."""

    authority: Template = DEFAULT_AUTHORITY
    """HOST:PORT that a CONNECT asks for."""

    identity: MeshIdentity | None = None
    """Who we are in the outer TLS, and who the server has to be; None: nobody, and whom its name says."""

    first_flight: FirstFlight = "with_request"
    """When the client's first bytes are sent: right after the tunnel request, or once that is answered."""

    inner: Inner | None = None
    """What the CONNECTs of the HBONE port carry that it takes: HBONE once more (ambient's double HBONE), the
    client's own mTLS, or plain bytes, for which we speak mTLS inside of the tunnel; None: it takes none."""

    inner_identity: MeshIdentity | None = None
    """Of `inner: none` who we are in the TLS inside, and who has to end it. Its server name is not used."""

    inner_as_port: bool = False
    """Of `inner: none` whether its folder is the one of the HBONE port's certificates."""

    inner_sni: str | None = None
    """Of `inner: none` the server name to send there; empty: none; None: the one that a sidecar sends."""

    warm: bool = False
    """Whether a connection and a token are there before the first client."""

    cold_start_s: float = 0.0
    """Seconds that the service may take to start, for it scales to zero; 0: it is always there."""

    max_connections: int | None = None
    """Connections on this route at once; None: `limits.max_connections_per_route`, 0: no bound of its own."""

    max_tunnel_lifetime_s: float | None = None
    """How long a tunnel on this route may live; None: `limits.max_tunnel_lifetime` for a POST, which goes to
    Cloud Run, else for ever; 0: for ever."""

    line: int | None = None
    """Where in the file it is, counting from 1; None if it is from elsewhere."""

    source: str = ""
    """The object of the cluster that it is from, as KIND NAMESPACE/NAME; empty if it is from the file."""

    @property
    def name(self) -> str:
        """Its name in metrics and logs: the host glob, with `hbone` before it where it takes CONNECTs only,
        for another route may have the same host."""
        return self.host if self.takes_names else f"hbone {self.host}"

    @property
    def takes_names(self) -> bool:
        """Whether it is for clients that name their destination in a ClientHello, and send mTLS."""
        return self.inner != "hbone"

    @property
    def takes_connects(self) -> bool:
        """Whether it is for CONNECTs of the HBONE port."""
        return self.inner is not None

    @property
    def templates(self) -> tuple[Template, ...]:
        """Everything that a destination's name fills."""
        url = self.tunnel or self.reverse
        found = [] if url is None else [url.host, url.port, url.path]
        if self.method == "CONNECT":
            found.append(self.authority)
        if self.token.audience is not None:
            found.append(self.token.audience)
        return tuple(found)

    def lifetime_s(self, of_posts_s: float) -> float:
        """Seconds that its tunnels may live, if POSTs have `of_posts_s` by default; 0: for ever."""
        if self.max_tunnel_lifetime_s is not None:
            return self.max_tunnel_lifetime_s
        return of_posts_s if self.tunnel is not None and self.method == "POST" else 0.0


@dataclass(frozen=True, slots=True)
class Token:
    """A token rule applied to one destination."""

    kind: TokenKind
    value: str = ""
    """The audience or the file; empty for `none`."""

    audience: str = ""
    """Whom the token in the file has to be for; empty: not checked."""

    service_account: str = ""
    """Whose token it is to be, where the route says it."""

    is_of_client: bool = field(default=False, compare=False)
    """The audience has something in it that the client has chosen."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where one destination goes. For a `forward` only the first five fields have a meaning."""

    kind: Literal["tunnel", "forward", "reverse"]
    route: int
    """The route's place in the table, from 0."""

    line: int | None
    """The route's line in its file."""

    dial: Address
    """Where to connect: the forward address, the route's `connect`, or the URL's host and port. Of `reverse`
    the registered name and the port that it is registered on, until a workload is chosen."""

    istio_alpn: bool = False
    """The client's hello has to offer one of Istio's ALPN names."""

    scheme: str = ""
    host: str = ""
    """The URL's host without brackets: also the name that the outer TLS asks for and checks."""

    port: int = 0
    path: str = ""
    authority: str = ""
    """HOST or HOST:PORT for the request, the scheme's own port left out (RFC 9110 section 4.2.3)."""

    ca: Path | None = None
    token: Token = Token("none")
    method: Method = "POST"
    connect_target: str = ""
    """HOST:PORT that a CONNECT asks for; empty for POST."""

    identity: MeshIdentity | None = None
    inner_identity: MeshIdentity | None = None
    """Of a CONNECT whose bytes are plain: who we are in the TLS inside of the tunnel, and who has to end it.
    Its server name is not used."""

    inner_sni: str = ""
    """The server name to send there; empty: none."""

    service: str = ""
    namespace: str = ""
    """What the destination's name says of these; empty if nothing."""

    is_connect: bool = False
    """`dial` is the route's `connect`, for whose name the search list of resolv.conf counts."""

    named_by_client: bool = False
    """Which name has to be looked up depends on what the client asks for."""

    cold_start_s: float = 0.0
    """Seconds that the service may take to start; 0: it is not waited for."""

    is_service: bool = False
    """`dial` is a Service of the cluster: connect to one of its endpoints instead."""

    @property
    def url(self) -> str:
        """The tunnel request's URL, or that of the origin which a CONNECT goes to."""
        return f"{self.scheme}://{self.authority}{self.path}"


class _Hosts:
    """The globs of those routes of a table that are for one kind of client."""

    def __init__(self) -> None:
        # Most hosts are whole names, thousands in a cluster: a table finds those.
        self._names: dict[str, int] = {}
        self._globs: list[tuple[int, re.Pattern[str]]] = []

    def add(self, index: int, glob: str) -> None:
        """Raises ValueError if `glob`, that of the route with this place, is wrong."""
        if ANY_LABEL in glob:
            self._globs.append((index, compile_glob(glob)))
        else:
            check_glob(glob)
            self._names.setdefault(glob.lower(), index)

    def first(self, host: str) -> int | None:
        """The place of the first route that matches `host`, in lower case."""
        named = self._names.get(host)
        for index, glob in self._globs:
            if named is not None and named < index:
                break
            if glob.fullmatch(host):
                return index
        return named


class RouteTable:
    """Routes in order: the first whose glob matches a host decides, even if it then has to refuse it. Those
    for clients that name it in a ClientHello and those for CONNECTs of the HBONE port do not see each other:
    a service usually has one of each."""

    def __init__(self, routes: Iterable[Route]) -> None:
        """Raises ValueError if a route's glob is wrong."""
        self.routes = tuple(routes)
        self._hosts = _Hosts()
        self._connect_hosts = _Hosts()
        for index, route in enumerate(self.routes):
            if route.takes_names:
                self._hosts.add(index, route.host)
            if route.takes_connects:
                self._connect_hosts.add(index, route.host)
        self._targets: dict[Destination, Target] = {}
        self._by_name: dict[str, Target] = {}  # the same, by how clients write them
        self._by_connect: dict[Address, Target] = {}

    def match(self, destination: Destination) -> Target:
        """The target of a destination. Raises NoRouteError if no route matches it, or the route cannot serve
        it."""
        target = self._targets.get(destination)
        if target is None:
            target = self._find(destination)
            if len(self._targets) >= MAX_CACHED_TARGETS:
                self._targets.clear()
            self._targets[destination] = target
        return target

    def find(self, server_name: str) -> Target:
        """The target of what a client names. Raises NoRouteError as `match`, SniError if it is malformed."""
        target = self._by_name.get(server_name)
        if target is None:
            target = self.match(istio_sni.parse(server_name))
            if len(self._by_name) >= MAX_CACHED_TARGETS:
                self._by_name.clear()
            self._by_name[server_name] = target
        return target

    def takes_connect(self, host: str) -> bool:
        """Whether a route takes the CONNECTs whose authority has this host, a name in lower case."""
        return self._connect_hosts.first(host) is not None

    def find_connect(self, authority: Address) -> Target:
        """The target of a CONNECT's authority, a host name in lower case and a port. Raises NoRouteError as
        `match`."""
        target = self._by_connect.get(authority)
        if target is None:
            target = self._find_connect(authority)
            if len(self._by_connect) >= MAX_CACHED_TARGETS:
                self._by_connect.clear()
            self._by_connect[authority] = target
        return target

    def warm(self) -> Iterator[Target]:
        """Where the routes lead that are to be warm. In what depends on a client's name is a stand-in."""
        for index, route in enumerate(self.routes):
            if route.warm and route.tunnel is not None:
                yield _tunnel_target(index, route, route.tunnel, _STAND_IN)

    def leads(self) -> Iterator[tuple[Route, Target | None]]:
        """Each route, and where it leads as far as that is known before a client has named anything; None:
        that depends on the name."""
        for index, route in enumerate(self.routes):
            yield route, self._known(index, route)

    def place(self, route: Route) -> str:
        """Where a route of this table is, for people."""
        return _place(self.routes.index(route), route)

    def _known(self, index: int, route: Route) -> Target | None:
        if route.to_service:
            return None
        if route.tunnel is not None and all(template.is_fixed for template in route.templates):
            return _tunnel_target(index, route, route.tunnel, _STAND_IN)
        try:
            return None if "*" in route.host or not route.takes_names else self.find(route.host)
        except NoRouteError:
            return None  # it needs more of the name, such as the port

    def explain(self, sni: str) -> str:
        """Lines for people: what `sni` says, which routes were tried, and where it goes or why not."""
        lines = [f"name       {shown(sni)}"]
        try:
            destination = istio_sni.parse(sni)
            lines.append(f"parsed     {_described(destination)}")
            lines += self._tried(self._hosts.first(destination.host.lower()), connects=False)
            lines += _directions(self._find(destination))
        except NoRouteError as error:
            lines.append(f"refused    {error}")
        return "\n".join(lines)

    def explain_connect(self, authority: Address) -> str:
        """The same for a CONNECT of the HBONE port, whose authority is a host name and a port."""
        authority = connect_name(authority)
        taken = self._connect_hosts.first(authority.host)
        lines = [f"authority  {shown(str(authority))}", *self._tried(taken, connects=True)]
        if taken is None:
            lines.append(
                f"goes to    {shown(str(authority))}, which is looked up: no route with inner takes it"
            )
            return "\n".join(lines)
        try:
            target = self._find_connect(authority)
            lines += _directions(target)
            lines.append(f"carries    {_INSIDE[self.routes[taken].inner or 'tls']}")
            lines += _inside(target)
        except NoRouteError as error:
            lines.append(f"refused    {error}")
        return "\n".join(lines)

    def _tried(self, taken: int | None, *, connects: bool) -> Iterator[str]:
        """Lines about the routes up to the one that is `taken`; all of them if none is."""
        tried = self.routes[:taken]
        of_file = [(index, route) for index, route in enumerate(tried) if not route.source]
        for index, route in of_file:
            if route.takes_connects if connects else route.takes_names:
                verdict = "no"
            else:
                verdict = "not for CONNECTs" if connects else "for CONNECTs of the HBONE port"
            yield f"{_place(index, route)}: {route.host}: {verdict}"
        if others := len(tried) - len(of_file):
            yield f"{others} of the cluster's routes: no"
        if taken is not None:
            yield f"{_place(taken, self.routes[taken])}: {self.routes[taken].host}: matches"

    def _find(self, destination: Destination) -> Target:
        try:
            check_host_name(destination.host)
        except ValueError as error:
            raise NoRouteError(f"no route for {_name(destination)}: {error}") from error
        index = self._hosts.first(destination.host.lower())
        if index is None:
            raise NoRouteError(f"no route for {_name(destination)}: {self._why_none(destination)}")
        route = self.routes[index]
        try:
            return _target(index, route, destination)
        except NoRouteError as error:
            raise NoRouteError(f"{_place(index, route)} cannot take {_name(destination)}: {error}") from error

    def _why_none(self, destination: Destination) -> str:
        index = self._connect_hosts.first(destination.host.lower())
        if index is None:
            return f"none of {len(self.routes)} matches its host"
        place = _place(index, self.routes[index])
        return (
            f"{place} is for CONNECTs of the HBONE port, inner: hbone; mTLS by SNI needs a route of its own"
        )

    def _find_connect(self, authority: Address) -> Target:
        index = self._connect_hosts.first(authority.host)
        text = shown(str(authority))
        if index is None:
            raise NoRouteError(f"no route for {text}: none with inner matches its host")
        route = self.routes[index]
        try:
            check_host_name(authority.host)
            target = _target(index, route, Destination(authority.host, authority.port, "", "outbound"))
            return target if route.inner_identity is None else _with_tls(target, route, authority)
        except (NoRouteError, ValueError) as error:
            raise NoRouteError(f"{_place(index, route)} cannot take {text}: {error}") from error

    def first_for(self, host: str) -> Route | None:
        """The route that decides about a host, in lower case, if there is one."""
        index = self._hosts.first(host)
        return None if index is None else self.routes[index]


def connect_name(authority: Address) -> Address:
    """The authority of a CONNECT as routes are compared with it: in lower case, without a dot at the end."""
    return Address(authority.host.lower().removesuffix("."), authority.port)


def _values(destination: Destination) -> dict[str, str]:
    """The placeholders' values, each checked for what it may consist of."""
    values = {
        "service": destination.service,
        "namespace": destination.namespace,
        "subset": destination.subset,
    }
    for name, value in values.items():
        if value and not _LABEL.fullmatch(value):
            raise NoRouteError(f"its {name} {shown(value)} is no DNS label")
    port = "" if destination.port is None else str(destination.port)
    if port and not is_port(port):
        raise NoRouteError(f"its port {port} is not in 1..{MAX_PORT}")
    values |= {"port": port, "host": destination.host}
    return {name: value.lower() for name, value in values.items()}


def _target(index: int, route: Route, destination: Destination) -> Target:
    if route.forward is not None:
        # A bare name is no mesh client's: Istio's gateways do not check it either.
        wanted = route.alpn == "istio" and bool(destination.direction)
        return Target("forward", index, route.line, route.forward, wanted)
    if route.to_service:
        return _service_target(index, route, destination)
    url = route.tunnel or route.reverse
    if url is None:
        raise NoRouteError("the route has neither tunnel nor forward nor reverse")
    values = _values(destination)
    host = url.host.expand(values)
    if not url.host.is_fixed:
        try:
            check_host_name(host)
        except ValueError as error:
            raise NoRouteError(f"its tunnel URL has no valid host: {error}") from error
    if route.reverse is not None:
        dial, path = Address(host, ports.REVERSE), url.path.expand(values)
        return Target(
            "reverse", index, route.line, dial, scheme="reverse", host=host, path=path, authority=host
        )
    return _tunnel_target(index, route, url, values)


def _service_target(index: int, route: Route, destination: Destination) -> Target:
    """As Istio's AUTO_PASSTHROUGH: only for names with a port, which only mesh clients may use."""
    values = _values(destination)
    if not destination.direction or not values["port"]:
        raise NoRouteError("a Service is asked for by a name of the form outbound_.PORT_._.HOST")
    if destination.subset:
        raise NoRouteError(f"subset {shown(destination.subset)}: Services are reached as a whole")
    dial = Address(values["host"], int(values["port"]))
    return Target("forward", index, route.line, dial, istio_alpn=True, is_service=True)


def _tunnel_target(index: int, route: Route, url: TunnelUrl, values: Mapping[str, str]) -> Target:
    host = url.host.expand(values)
    address = Address(host, int(url.port.expand(values)))
    bracketed = f"[{host}]" if ":" in host else host
    return Target(
        kind="tunnel",
        route=index,
        line=route.line,
        dial=route.connect or address,
        scheme=url.scheme,
        host=host,
        port=address.port,
        path="" if route.method == "CONNECT" else url.path.expand(values),
        authority=bracketed if address.port == DEFAULT_PORTS[url.scheme] else str(address),
        ca=route.ca,
        token=_token(route, values),
        method=route.method,
        connect_target=_connect_target(route.authority, values) if route.method == "CONNECT" else "",
        identity=route.identity,
        service=values["service"],
        namespace=values["namespace"],
        is_connect=route.connect is not None,
        named_by_client=route.connect is None and not url.host.is_fixed,
        cold_start_s=route.cold_start_s,
    )


def _with_tls(target: Target, route: Route, authority: Address) -> Target:
    """The target of a CONNECT whose bytes are plain."""
    name = route.inner_sni
    if name is None:
        name = istio_sni.server_name(authority)
        if len(name) > istio_sni.MAX_NAME_CHARS:
            raise NoRouteError(f"the server name of it has {len(name)} characters, which TLS has no room for")
    return replace(target, inner_identity=route.inner_identity, inner_sni=name)


def _connect_target(template: Template, values: Mapping[str, str]) -> str:
    target = template.expand(values)
    if not template.is_fixed:
        try:
            Address.parse(target)
        except ValueError as error:
            raise NoRouteError(f"it makes no target for CONNECT: {error}") from error
    return target


def _token(route: Route, values: Mapping[str, str]) -> Token:
    rule = route.token
    audience = "" if rule.audience is None else rule.audience.expand(values)
    if rule.file is not None:
        return Token("file", str(rule.file), audience)
    if rule.audience is None:
        return Token("none")
    names = rule.audience.names
    is_of_client = bool(names & {"port", "subset"} or (names and ANY_LABEL in route.host))
    return Token("audience", audience, service_account=rule.service_account, is_of_client=is_of_client)


def _directions(target: Target) -> list[str]:
    if target.kind == "forward":
        of_service = "an endpoint of " if target.is_service else ""
        lines = [f"goes to    {of_service}{target.dial}, as it is, without a tunnel"]
        if target.istio_alpn:
            lines.append(f"lets in    who offers ALPN {', '.join(sorted(istio_sni.ISTIO_ALPN))}")
        return lines
    if target.kind == "reverse":
        path = f"{target.method} {target.path}"
        return [f"goes to    a workload that has registered {target.host}", f"asks for   {path}"]
    lines = [f"goes to    {target.method} {target.url}"]
    if target.connect_target:
        lines.append(f"asks for   {target.connect_target}")
    lines.append(f"dials      {target.dial}")
    if target.identity is not None:
        lines += [f"proves     {target.identity.folder}", f"trusts     {', '.join(target.identity.peers)}"]
    elif target.scheme == "https":
        lines.append(f"trusts     {target.ca or 'the system certificates'}")
    if target.cold_start_s:
        lines.append(f"waits      {target.cold_start_s:g} s for a service that starts")
    token = target.token
    more = f", which has to be for {token.audience}" if token.audience else ""
    if token.service_account:
        more = f", of {token.service_account}"
    return [*lines, f"token      {token.kind} {token.value}{more}".rstrip()]


def _inside(target: Target) -> list[str]:
    identity = target.inner_identity
    if identity is None:
        return []
    return [
        f"proves     {identity.folder}, inside",
        f"trusts     {', '.join(identity.peers)}, inside",
        f"names      {target.inner_sni or 'nothing'}, inside",
    ]


def _described(destination: Destination) -> str:
    port = "none" if destination.port is None else str(destination.port)
    parts = {
        "host": destination.host,
        "port": port,
        "subset": destination.subset or "none",
        "service": destination.service or "none",
        "namespace": destination.namespace or "none",
    }
    return ", ".join(f"{name} {value}" for name, value in parts.items())


def _place(index: int, route: Route) -> str:
    if route.source:
        return f"route of {route.source}"
    return f"routes[{index}]" if route.line is None else f"routes[{index}] (line {route.line})"


def _name(destination: Destination) -> str:
    """The server name that says this destination, for errors."""
    if destination.port is None:
        return shown(destination.host)
    return shown(f"{destination.direction}_.{destination.port}_.{destination.subset}_.{destination.host}")

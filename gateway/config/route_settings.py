"""What `routes:` in the gateway's file can set.

Owned here: the fields of a route, what goes with what, and that the files which a route names hold what they
should. What a route then does is `routes.py`'s, the rest of the file `config.py`'s.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from gateway.config.hbone_settings import mesh_identity, or_off
from gateway.config.limit_settings import MAX_CONNECTIONS
from gateway.config.name_notes import hint, note_narrow
from gateway.config.named_files import ca_file, later_file
from gateway.config.yaml_nodes import Fields, Value
from gateway.rules.host_globs import EarlierGlobs, can_be_service, compile_glob
from gateway.rules.routes import (
    DEFAULT_AUTHORITY,
    Alpn,
    Route,
    TokenRule,
)
from gateway.rules.templates import (
    SERVICE_FORM,
    Template,
    TunnelUrl,
    read_target,
)
from shared.address import Address
from shared.credentials.token_sources.token_settings import is_own_machine, service_account
from shared.errors import ConfigError
from shared.net.tls.mesh_tls import MeshIdentity
from shared.trust.peer_patterns import UNTOLD, TrustDomain

MAX_ROUTES = 1000
"""An unknown name is compared with every route, 0.1 to 0.4 µs each, before it is refused."""

_IDENTITY_FIELDS = ("identity", "peer", "sni", "crl")
_TUNNEL_ONLY_FIELDS = ("connect", "ca", "token", "method", "authority", *_IDENTITY_FIELDS)
_ROUTE_LIMITS = ("max_connections", "max_tunnel_lifetime")
_KINDS = ("tunnel", "forward", "reverse")
FIELDS = ("host", *_KINDS, "alpn", *_TUNNEL_ONLY_FIELDS, *_ROUTE_LIMITS)


def read(
    value: Value, folder: Path, trust: TrustDomain = UNTOLD, *, can_register: bool = True
) -> tuple[Route, ...]:
    """The routes of the list `value`; paths in it start from `folder`, `trust` is our own trust domain, and
    `can_register` says whether there is a port where workloads register. Raises ConfigError."""
    common = _Common(folder, trust, can_register)
    routes: list[Route] = []
    places: dict[str, int] = {}
    before = EarlierGlobs()
    for index, item in enumerate(value.items(MAX_ROUTES)):
        route = item.tried(lambda item: _route(item, common), None)
        if route is None or not route.host:
            continue
        if route.host in places:
            item.refuse(item.error(f"is never reached: routes[{places[route.host]}] has the same host"))
            continue
        places[route.host] = index
        if (shadow := before.covering(route.host)) is not None:
            place, host = shadow
            item.warn(f"is never reached: routes[{place}], {host}, matches every name that this one matches")
        before.add(index, route.host)
        routes.append(route)
    return tuple(routes)


def _route(value: Value, common: _Common) -> Route:
    given = value.mapping(FIELDS)
    host = given.read_needed("host", _host, "")
    kind, alpn = _kind(given), given.get("alpn")
    if alpn and kind != "forward":
        alpn.refuse(alpn.error("has a meaning only beside forward"))
    if kind != "tunnel":
        for name in _TUNNEL_ONLY_FIELDS:
            if extra := given.get(name):
                extra.refuse(extra.error(f"has no meaning beside {kind}, only beside tunnel"))
    route = Route(host, line=value.line, **_route_limits(given))
    if kind == "forward":
        route = replace(
            route,
            forward=given.read(kind, lambda value: value.address(least_port=1), None),
            alpn=given.read("alpn", _alpn, "istio"),
        )
    elif kind == "reverse":
        route = replace(route, reverse=given.read(kind, lambda value: _registered(value, common), None))
    else:
        route = _tunnel(given, route, common)
    if host:
        _check_host(given.need("host"), route)
    return route


def _kind(given: Fields) -> str:
    """Which of _KINDS the route is; after a mistake, which is noted, what it is likeliest to be."""
    try:
        return given.one_of(_KINDS)
    except ConfigError as error:
        given.owner.refuse(error)
        likely = [*given.values, *given.failed, "tunnel"]
        return next(kind for kind in likely if kind in _KINDS)


def _host(value: Value) -> str:
    value.parsed(compile_glob)
    return value.text().lower()


def _alpn(value: Value) -> Alpn:
    return "any" if value.choice(("istio", "any")) == "any" else "istio"


def _tunnel(given: Fields, route: Route, common: _Common) -> Route:
    """A route with a tunnel; parts with a mistake, which is noted, are left out."""
    connects = given.read("method", lambda value: value.choice(("POST", "CONNECT")) == "CONNECT", False)
    parse = TunnelUrl.parse_origin if connects else TunnelUrl.parse
    url = given.read("tunnel", lambda value: value.parsed(parse), None)
    connect = given.read("connect", lambda value: value.address(least_port=1), None)
    token = given.read("token", lambda value: _token(value, common), None)
    authority = given.get("authority")
    if authority and not connects and "method" not in given.failed:
        authority.refuse(
            authority.error("has a meaning only beside method: CONNECT, which it is the target of")
        )
        authority = None
    trust = None if url is None else given.owner.tried(lambda _: _trust(given, url, common), None)
    if url is not None and token is not None and "connect" not in given.failed:
        _refuse_clear_text(given.need("token"), token, url, connect)
    return replace(
        route,
        tunnel=url,
        connect=connect,
        ca=trust if isinstance(trust, Path) else None,
        identity=trust if isinstance(trust, MeshIdentity) else None,
        token=token
        or (TokenRule() if url is None or "token" in given.values else _default_token(url, trust)),
        method="CONNECT" if connects else "POST",
        authority=authority.tried(lambda value: value.parsed(read_target), DEFAULT_AUTHORITY)
        if authority
        else DEFAULT_AUTHORITY,
    )


def _check_host(value: Value, route: Route) -> None:
    """Whether the names that a route matches have what its templates need."""
    if can_be_service(route.host):
        return
    for template in route.templates:
        for name in template.of_service:
            need = f"which {{{name}}} in {template.text} needs"
            told = f"matches no name of the form {SERVICE_FORM}, {need}{hint(route.host)}"
            value.refuse(value.error(told))
            return
    note_narrow(value, route.host)


def _refuse_clear_text(value: Value, token: TokenRule, url: TunnelUrl, connect: Address | None) -> None:
    """A token that everybody on its way could read."""
    if url.scheme == "https" or token == TokenRule():
        return
    host = connect.host if connect is not None else url.host.text
    if not is_own_machine(host):
        told = f"would go to {host} in clear text: use https, or token: none"
        value.refuse(value.error(f"{told} (http with a token is for loopback addresses only)"))


class _RouteLimits(TypedDict):
    max_connections: int | None
    max_tunnel_lifetime_s: float | None


def _route_limits(given: Fields) -> _RouteLimits:
    most, lifetime = _ROUTE_LIMITS
    return {
        "max_connections": given.read(most, lambda value: value.integer(0, MAX_CONNECTIONS), None),
        "max_tunnel_lifetime_s": given.read(lifetime, or_off, None),
    }


def _registered(value: Value, common: _Common) -> TunnelUrl:
    if not common.can_register:
        raise value.error("needs a section reverse in the file, where workloads register")
    if value.word() == "true":
        return TunnelUrl.parse_registered("{host}")
    return value.parsed(TunnelUrl.parse_registered)


def _trust(given: Fields, url: TunnelUrl, common: _Common) -> Path | MeshIdentity | None:
    """What the outer TLS trusts: a CA file, or the roots of the identity that it shows."""
    ca, identity = given.get("ca"), given.get("identity")
    if url.scheme != "https":
        for name in ("ca", *_IDENTITY_FIELDS):
            if extra := given.get(name):
                extra.refuse(extra.error("has no meaning for an http tunnel, which has no TLS"))
        return None
    if identity is None:
        for name in _IDENTITY_FIELDS:
            if (extra := given.get(name)) and "identity" not in given.failed:
                extra.refuse(extra.error("has a meaning only beside identity"))
        return ca.tried(common.ca, None) if ca else None
    if ca:
        ca.refuse(ca.error("cannot stand beside identity, whose folder has the roots"))
    return mesh_identity(given, common.folder, common.trust)


def _default_token(url: TunnelUrl, trust: object) -> TokenRule:
    # Cloud Run wants the service's URL as the audience; in the clear no token goes out unasked, and the mesh
    # has certificates instead.
    wanted = url.scheme == "https" and not isinstance(trust, MeshIdentity)
    return TokenRule(audience=url.origin()) if wanted else TokenRule()


def _token(value: Value, common: _Common) -> TokenRule:
    if not value.is_mapping:
        # What stands here instead may be a token: it is not repeated.
        if value.word() != "none":
            raise value.error("must be none, {audience: TEMPLATE} or {file: PATH}")
        return TokenRule()
    given = value.mapping(("audience", "file", "service_account"))
    file, account = given.get("file"), given.get("service_account")
    if file is None and given.get("audience") is None and not given.failed:
        raise value.error("needs audience or file")
    if file and account:
        account.refuse(account.error("has no meaning beside file, only beside audience"))
    return TokenRule(
        given.read("audience", lambda value: value.parsed(Template.parse), None),
        given.read("file", lambda value: later_file(value, common.folder), None),
        given.read("service_account", lambda value: value.parsed(service_account), "") if not file else "",
    )


class _Common:
    """What all routes of a file have in common: its folder, from which paths start, the CA files that are
    known to be good, our trust domain, and whether workloads can register."""

    def __init__(self, folder: Path, trust: TrustDomain, can_register: bool) -> None:
        self.folder = folder
        self.trust = trust
        self.can_register = can_register
        # Many routes share one CA file: reading a system's bundle takes 10 ms each time.
        self._good_cas: set[Path] = set()

    def ca(self, value: Value) -> Path:
        """The path of a CA file, once it is known to hold certificates. Raises ConfigError."""
        path = self.folder / value.text()
        if path not in self._good_cas:
            self._good_cas.add(ca_file(value, self.folder))
        return path

"""What `routes:` in the gateway's file can set.

Owned here: the fields of a route, what goes with what, and that the files which a route names hold what they
should. What a route then does is `routes.py`'s, the rest of the file `config.py`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from gateway.hbone_settings import mesh_identity, or_off
from gateway.host_globs import compile_glob
from gateway.limit_settings import MAX_CONNECTIONS
from gateway.named_files import ca_file
from gateway.routes import DEFAULT_AUTHORITY, Route, TokenRule
from gateway.templates import Template, TunnelUrl, read_target
from gateway.yaml_nodes import Fields, Value
from shared.identity.peer_patterns import UNTOLD, TrustDomain
from shared.identity.token_sources.token_settings import file_path, service_account
from shared.net.mesh_tls import MeshIdentity

MAX_ROUTES = 1000
"""An unknown name is compared with every route, 0.1 to 0.4 µs each, before it is refused."""

_IDENTITY_FIELDS = ("identity", "peer", "sni", "crl")
_TUNNEL_ONLY_FIELDS = ("connect", "ca", "token", "method", "authority", *_IDENTITY_FIELDS)
_ROUTE_LIMITS = ("max_connections", "max_tunnel_lifetime")
_KINDS = ("tunnel", "forward", "reverse")
FIELDS = ("host", *_KINDS, "alpn", *_TUNNEL_ONLY_FIELDS, *_ROUTE_LIMITS)


def read(value: Value, folder: Path, trust: TrustDomain = UNTOLD) -> tuple[Route, ...]:
    """The routes of the list `value`; paths in it start from `folder`, `trust` is our own trust domain.
    Raises ConfigError."""
    files = _NamedFiles(folder, trust)
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
    given = value.mapping(FIELDS)
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
    peer, sni, crl = map(given.get, ("peer", "sni", "crl"))
    return mesh_identity(identity, peer, sni, files.folder, crl=crl, trust=files.trust)


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
    given = value.mapping(("audience", "file", "service_account"))
    file, audience, account = (given.get(name) for name in ("file", "audience", "service_account"))
    if file is None and audience is None:
        raise value.error("needs audience or file")
    if file and account:
        raise account.error("has no meaning beside file, only beside audience")
    return TokenRule(
        audience.parsed(Template.parse) if audience else None,
        files.token(file) if file else None,
        account.parsed(service_account) if account else "",
    )


class _NamedFiles:
    """The files that a file of settings names, relative to its own folder, and the trust domain of it all."""

    def __init__(self, folder: Path, trust: TrustDomain) -> None:
        self.folder = folder
        self.trust = trust
        # Many routes share one CA file: reading a system's bundle takes 10 ms each time.
        self._good_cas: set[Path] = set()

    def token(self, value: Value) -> Path:
        """The path of a token file, which need not exist yet."""
        return self.folder / value.parsed(file_path)

    def ca(self, value: Value) -> Path:
        """The path of a CA file, once it is known to hold certificates. Raises ConfigError."""
        path = self.folder / value.text()
        if path not in self._good_cas:
            self._good_cas.add(ca_file(value, self.folder))
        return path

"""What `routes:` in hgate's file can set: the fields of a route, and which of them go together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.config.limit_settings import CONNECTIONS_OR_ALL, LASTING, LEAST_LASTING_S
from gateway.config.name_notes import hint, note_narrow
from gateway.config.rule_settings import CERTIFICATES, PEERS_FORM, peers
from gateway.config.sections import CA_FILE, Context, Structure, Table, read_field
from gateway.config.yaml_nodes import Fields, Value
from gateway.rules.host_globs import EarlierGlobs, can_be_service
from gateway.rules.routes import DEFAULT_AUTHORITY, Inner, Route, TokenRule
from gateway.rules.templates import OF_SERVICE, SERVICE_FORM, Template, TunnelUrl, read_target
from shared import ports
from shared.address import Address, is_own_machine
from shared.cluster.service_annotations import MAX_COLD_START_S
from shared.config.fields import Setting
from shared.config.kinds import TARGET, Choice, Duration, FilePath, FolderPath, Parsed, host_name
from shared.credentials.token_sources.token_settings import service_account
from shared.errors import ConfigError
from shared.name_globs import ANY_LABEL, compile_glob
from shared.net.tls.mesh_tls import MeshIdentity

MAX_ROUTES = 1000
"""An unknown name is compared with every route, 0.1 to 0.4 µs each, before it is refused."""


# How single fields are read.


def _host(text: str) -> str:
    compile_glob(text)
    return text.lower()


def _registered(value: Value, context: Context) -> TunnelUrl:
    if "reverse" not in context.above:
        raise value.error("needs a section reverse in the file, where workloads register")
    if value.word() == "true":
        return TunnelUrl.parse_registered("{host}")
    return value.parsed(TunnelUrl.parse_registered)


def _peers(value: Value, context: Context) -> tuple[str, ...]:
    return peers(value, context, anybody=False)


def _inner(value: Value, context: Context) -> Inner:
    found: Inner = value.of(_INNER)
    if "hbone" not in context.above:
        raise value.error("needs a section hbone in the file, whose port takes CONNECTs")
    return found


def _sni(value: Value, _: Context) -> str:
    return "" if value.word() == "none" else value.parsed(host_name)


_INNER: Choice[Inner] = Choice(("hbone", "tls", "none"))

_OTHER_END = {"hbone": ports.INBOUND_MTLS, "tls": ports.HBONE, "none": ports.HBONE}
"""The port in the container that ends something else than what `inner` says."""

TOKEN: Table = {
    "audience": Setting(
        Parsed(Template.parse, "template", quoted=True),
        None,
        "audience of the ID token that is asked for; of the token in file it is demanded",
    ),
    "file": Setting(
        FilePath(),
        None,
        "file with the token",
        "It may appear and change at any time. A JWT in it that has expired is not sent.",
    ),
    "service_account": Setting(
        Parsed(service_account, "e-mail address", quoted=True),
        "",
        "whose token it is to be, by impersonation",
        "Beside audience only.",
        unset="as tokens has it",
    ),
}


def _token(value: Value, context: Context) -> TokenRule:
    if not value.is_mapping:
        # What stands here instead may be a token: it is not repeated.
        if value.word() != "none":
            raise value.error("must be none, {audience: TEMPLATE} or {file: PATH}")
        return TokenRule()
    given = value.mapping(tuple(TOKEN))
    file, account = given.get("file"), given.get("service_account")
    if file is None and given.get("audience") is None and not given.failed:
        raise value.error("needs audience or file")
    if file and account:
        account.refuse(account.error("has no meaning beside file, only beside audience"))
        del given.values["service_account"]
    inside = context.within(given)
    return TokenRule(*(read_field(given, name, one, inside) for name, one in TOKEN.items()))


ROUTE: Table = {
    "host": Setting(
        Parsed(_host, "glob", quoted=True),
        "",
        "names that the route is for",
        "HOST of outbound_.PORT_.SUBSET_.HOST, or the bare name. * is a label or a part of one, ** one or "
        "more labels.",
        needed="",
    ),
    "tunnel": Setting(
        Parsed(TunnelUrl.parse, "URL template, https or http"),
        None,
        "URL of a tunnel request in which the connection is carried",
        "{service}, {namespace}, {port}, {subset} and {host} stand for parts of the name. A route has one of "
        "tunnel, forward and reverse.",
    ),
    "forward": Setting(TARGET, None, "where the connection is carried to as it is, over TCP"),
    "reverse": Setting(
        Structure(_registered, "template of a name, or true"),
        None,
        "name of a registered workload that the connection is carried to",
        "true is {host}. It needs a section reverse in the file.",
    ),
    "alpn": Setting(
        Choice(("istio", "any")),
        "istio",
        "beside forward: whom an Istio name lets in",
        "istio: clients that offer one of Istio's ALPN names.",
    ),
    "connect": Setting(TARGET, None, "beside tunnel: dial here", unset="the URL's host"),
    "ca": Setting(
        CA_FILE, None, "beside tunnel: certificates to trust for the outer TLS", unset="the system's"
    ),
    "token": Setting(
        Structure(_token, "section, or none", TOKEN),
        None,
        "beside tunnel: the token of the tunnel request",
        "A token goes in clear text to loopback addresses only.",
        unset="an ID token for the URL's scheme and host; none for http, and beside identity",
    ),
    "method": Setting(
        Choice(("POST", "CONNECT")),
        "POST",
        "beside tunnel: method of the tunnel request",
        "CONNECT is HBONE.",
    ),
    "authority": Setting(
        Parsed(read_target, "HOST:PORT template", quoted=True),
        DEFAULT_AUTHORITY,
        "beside method: CONNECT: target that it asks for",
        unset="`{host}:{port}`",
    ),
    "identity": Setting(
        FolderPath(),
        None,
        "beside tunnel: folder with the certificate, key and roots for the outer TLS",
        f"{CERTIFICATES} Beside inner: none it is for the TLS inside of the tunnel.",
        unset="none; beside inner: none, hbone.certificates",
    ),
    "peer": Setting(
        Structure(_peers, PEERS_FORM), (), "beside identity and inner: none: whom the server has to be"
    ),
    "sni": Setting(
        Structure(_sni, "host name, or none"),
        "",
        "beside identity and inner: none: server name to send",
        unset="`none`; beside inner: none, outbound_.PORT_._.HOST as a sidecar",
    ),
    "crl": Setting(
        FilePath(),
        None,
        "beside identity and inner: none: file with certificate revocation lists of the servers, which is "
        "followed",
        unset="none",
    ),
    "first_flight": Setting(
        Choice(("with_request", "after_answer")),
        "with_request",
        "beside tunnel and reverse: when the client's first bytes are sent, up to 64 KiB",
        "with_request saves a round trip. after_answer is for far sides that accept no byte before they have "
        "answered.",
    ),
    "inner": Setting(
        Structure(_inner, "hbone, tls or none"),
        None,
        "beside tunnel: what the CONNECTs of the HBONE port carry that the route takes",
        "hbone: HBONE once more, as ambient clients send it to another network (tunnel ends with "
        "/_hbone/15008); only such CONNECTs take the route. tls: the client's own mTLS (/_hbone/15003). "
        "none: plain bytes, which hgate sends on in mTLS of its own (/_hbone/15003); it needs peer. Clients "
        "by SNI take the route with tls and none, too. It needs a section hbone in the file.",
        unset="the HBONE port does not use the route",
    ),
    "warm": Setting(
        Choice(("true", "false")),
        "false",
        "beside tunnel: whether a connection and a token are there before the first client",
        "They stay while the route does. hgate is ready when they are, or after 10 s. It needs a URL and an "
        "audience without placeholders.",
    ),
    "cold_start": Setting(
        Duration(LEAST_LASTING_S, MAX_COLD_START_S, off=True),
        0.0,
        "beside tunnel: how long a tunnel waits for a service that scales to zero; 0: not at all",
        "In that time 429, 502, 503 and 504, a dial that failed, a lost connection and no answer are asked "
        "again after a pause, whatever limits.response_timeout, connect_timeout and max_retries say. If "
        "response_timeout is longer, it counts instead. limits.max_cold_starts bounds how many wait.",
    ),
    "max_connections": Setting(
        CONNECTIONS_OR_ALL,
        None,
        "clients at once on this route; 0: as many as in all",
        unset="limits.max_connections_per_route",
    ),
    "max_tunnel_lifetime": Setting(
        LASTING,
        None,
        "how long a tunnel of this route may live; 0: for ever",
        unset="limits.max_tunnel_lifetime for a tunnel with POST, else for ever",
    ),
}

_NO_TLS = "has no meaning for an http tunnel, which has no TLS"

_KINDS = ("tunnel", "forward", "reverse")
_IDENTITY_FIELDS = ("identity", "peer", "sni", "crl")
_REQUEST_FIELDS = ("connect", "ca", "token", "method", "authority", "inner", "warm", "cold_start")
_TUNNEL_ONLY_FIELDS = (*_REQUEST_FIELDS, *_IDENTITY_FIELDS)


# Which fields go together.


class _Given:
    """The fields of one route."""

    def __init__(self, value: Value, context: Context) -> None:
        self.fields = value.mapping(tuple(ROUTE))
        self.context = context.within(self.fields)

    def read(self, name: str) -> Any:
        """The value of a field, the default if it is absent or has a mistake, which is noted."""
        return read_field(self.fields, name, ROUTE[name], self.context)

    def refuse(self, names: tuple[str, ...], reason: str) -> None:
        """Notes that those of the fields `names` that are there should not be."""
        for name in names:
            if extra := self.fields.get(name):
                extra.refuse(extra.error(reason))


def read(value: Value, context: Context) -> tuple[Route, ...]:
    """The routes of the list `value`. Raises ConfigError."""
    routes: list[Route] = []
    # Clients by SNI and CONNECTs do not see each other's routes.
    of_names, of_connects = _Earlier(), _Earlier()
    for index, item in enumerate(value.items(MAX_ROUTES)):
        route = item.tried(lambda item: _route(item, context), None)
        if route is None or not route.host:
            continue
        own = [
            earlier
            for earlier, takes in ((of_names, route.takes_names), (of_connects, route.takes_connects))
            if takes
        ]
        if same := [earlier.places[route.host] for earlier in own if route.host in earlier.places]:
            place = same[0]
            item.refuse(item.error(f"is never reached: routes[{place}] has the same host"))
            continue
        shadows = [earlier.globs.covering(route.host) for earlier in own]
        if None not in shadows and (shadow := shadows[0]) is not None:
            place, host = shadow
            item.warn(f"is never reached: routes[{place}], {host}, matches every name that this one matches")
        for earlier in own:
            earlier.places[route.host] = index
            earlier.globs.add(index, route.host)
        routes.append(route)
    return tuple(routes)


class _Earlier:
    """The routes so far that are for one kind of client."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        self.globs = EarlierGlobs()


ROUTES = Structure(read, "list of routes", ROUTE, each=True)


def _route(value: Value, context: Context) -> Route:
    given = _Given(value, context)
    host = given.read("host")
    kind = _kind(given.fields)
    if kind != "forward":
        given.refuse(("alpn",), "has a meaning only beside forward")
    else:
        given.refuse(("first_flight",), "has no meaning beside forward, only beside tunnel and reverse")
    if kind != "tunnel":
        given.refuse(_TUNNEL_ONLY_FIELDS, f"has no meaning beside {kind}, only beside tunnel")
    route = Route(
        host,
        line=value.line,
        max_connections=given.read("max_connections"),
        max_tunnel_lifetime_s=given.read("max_tunnel_lifetime"),
        first_flight=given.read("first_flight"),
    )
    if kind == "forward":
        route = replace(route, forward=given.read("forward"), alpn=given.read("alpn"))
    elif kind == "reverse":
        route = replace(route, reverse=given.read("reverse"))
    else:
        route = _tunnel(given, route)
    if host:
        _check_host(given.fields.need("host"), route)
    return route


def _kind(given: Fields) -> str:
    """Which of _KINDS the route is; after a mistake, which is noted, what it is likeliest to be."""
    try:
        return given.one_of(_KINDS)
    except ConfigError as error:
        given.owner.refuse(error)
        likely = [*given.values, *given.failed, "tunnel"]
        return next(kind for kind in likely if kind in _KINDS)


def _tunnel(given: _Given, route: Route) -> Route:
    """A route with a tunnel; parts with a mistake, which is noted, are left out."""
    fields = given.fields
    method = given.read("method")
    connects = method == "CONNECT"
    parse = TunnelUrl.parse_origin if connects else TunnelUrl.parse
    url = fields.read("tunnel", lambda value: value.parsed(parse), None)
    connect, token = given.read("connect"), given.read("token")
    authority = DEFAULT_AUTHORITY
    if connects or "method" in fields.failed:
        authority = given.read("authority")
    else:
        given.refuse(("authority",), "has a meaning only beside method: CONNECT, which it is the target of")
    inner = given.read("inner")
    if inner is not None and connects:
        given.refuse(("inner",), "has a meaning only beside method: POST")
    elif inner is not None and url is not None:
        _note_end(fields.need("tunnel"), url, inner)
    inside = None
    if inner == "none" and not connects:
        ca, identity = None if url is None else _ca(given, url), None
        inside = _identity_inside(given, fields.need("inner"))
    else:
        ca, identity = (None, None) if url is None else _trust(given, url)
    if url is not None and token is not None and "connect" not in fields.failed:
        _refuse_clear_text(fields.need("token"), token, url, connect)
    if token is None:
        mistaken = "token" in fields.values
        token = TokenRule() if url is None or mistaken else _default_token(url, identity)
    warm = given.read("warm") == "true"
    if warm and url is not None:
        _check_warm(fields.need("warm"), url, token)
    return replace(
        route,
        tunnel=url,
        inner=inner,
        inner_identity=inside,
        inner_as_port=inside is not None and "identity" not in fields.values,
        inner_sni=given.read("sni") if inside is not None and "sni" in fields.values else None,
        warm=warm,
        cold_start_s=given.read("cold_start"),
        connect=connect,
        ca=ca,
        identity=identity,
        token=token,
        method=method,
        authority=authority,
    )


def _note_end(value: Value, url: TunnelUrl, inner: Inner) -> None:
    """Warns of a tunnel that leads to what ends the other kind of bytes."""
    other = _OTHER_END[inner]
    right = next(port for port in _OTHER_END.values() if port != other)
    if url.path.text.endswith(f"/_hbone/{other}"):
        value.warn(f"leads to {other}, but inner: {inner} is ended at {right}: did you mean /_hbone/{right}?")


def _check_warm(value: Value, url: TunnelUrl, token: TokenRule) -> None:
    """Whether it is known, before a client has named anything, where to connect and which token to get."""
    for template in (url.host, url.port, token.audience):
        if template is not None and not template.is_fixed:
            reason = f"only a client's name says what {template.text} is: write it out, in a route of its own"
            value.refuse(value.error(reason))
            return


def _check_host(value: Value, route: Route) -> None:
    """Whether the names that a route matches have what its templates need, and no more than they use."""
    if can_be_service(route.host):
        _note_domain(value, route)
        return
    for template in route.templates:
        for name in template.of_service:
            need = f"which {{{name}}} in {template.text} needs"
            reason = f"matches no name of the form {SERVICE_FORM}, {need}{hint(route.host)}"
            value.refuse(value.error(reason))
            return
    note_narrow(value, route.host)


def _note_domain(value: Value, route: Route) -> None:
    """Warns where a service has one name more in each domain: rules judge names as CONNECTs have them."""
    url = route.tunnel
    if url is None or not route.takes_connects or ANY_LABEL not in route.host.rpartition(".")[2]:
        return
    names = url.host.names | url.path.names
    if "host" not in names and not names.isdisjoint(OF_SERVICE):
        value.warn(
            "ends with a star, so in every domain there is another name of the same service: whom a rule of "
            "hbone denies one, another is open to. End it with the cluster's domain"
        )


def _refuse_clear_text(value: Value, token: TokenRule, url: TunnelUrl, connect: Address | None) -> None:
    """A token that everybody on its way could read."""
    if url.scheme == "https" or token == TokenRule():
        return
    host = connect.host if connect is not None else url.host.text
    if not is_own_machine(host):
        reason = f"would go to {host} in clear text: use https, or token: none"
        value.refuse(value.error(f"{reason} (http with a token is for loopback addresses only)"))


def _trust(given: _Given, url: TunnelUrl) -> tuple[Path | None, MeshIdentity | None]:
    """What the outer TLS trusts: a CA file, or the roots of the identity that it shows."""
    fields = given.fields
    if url.scheme != "https":
        given.refuse(("ca", *_IDENTITY_FIELDS), _NO_TLS)
        return None, None
    identity = fields.get("identity")
    if identity is None:
        if fields.failed.isdisjoint(("identity", "inner")):
            given.refuse(_IDENTITY_FIELDS, "has a meaning only beside identity, or inner: none")
        return given.read("ca"), None
    given.refuse(("ca",), "cannot stand beside identity, whose folder has the roots")
    if "peer" not in fields.values and "peer" not in fields.failed:
        identity.refuse(identity.error("needs peer beside it: who the server has to be"))
        return None, None
    folder, peers_, sni, crl = map(given.read, _IDENTITY_FIELDS)
    return None, None if folder is None else MeshIdentity(folder, peers_, sni, crl, given.context.trust)


def _ca(given: _Given, url: TunnelUrl) -> Path | None:
    """What the outer TLS trusts, where an identity is for the TLS inside."""
    if url.scheme == "https":
        return given.read("ca")  # type: ignore[no-any-return]  # what a CA_FILE is
    given.refuse(("ca",), _NO_TLS)
    return None


def _identity_inside(given: _Given, inner: Value) -> MeshIdentity | None:
    """Who we are inside of the tunnel, and who has to be there. If the route names no folder,
    `with_certificates` does."""
    fields = given.fields
    if "peer" not in fields.values and "peer" not in fields.failed:
        inner.refuse(inner.error("none needs peer beside it: who has to end the TLS inside of the tunnel"))
        return None
    folder, peers_, crl = map(given.read, ("identity", "peer", "crl"))
    return MeshIdentity(folder or Path(), peers_, crl=crl, trust=given.context.trust)


def with_certificates(routes: tuple[Route, ...], folder: Path) -> tuple[Route, ...]:
    """The routes with `folder`, that of the HBONE port, where they are to prove what the port proves."""
    return tuple(
        replace(route, inner_identity=replace(route.inner_identity, folder=folder))
        if route.inner_identity is not None and route.inner_as_port
        else route
        for route in routes
    )


def _default_token(url: TunnelUrl, identity: MeshIdentity | None) -> TokenRule:
    # Cloud Run wants the service's URL as the audience; in the clear no token goes out unasked, and the mesh
    # has certificates instead.
    wanted = url.scheme == "https" and identity is None
    return TokenRule(audience=url.origin()) if wanted else TokenRule()

"""The routing table: which destinations the gateway serves, and where each of them goes.

Owned here: what a route is (host glob, URL template, token rule), how a destination finds its route, and how
a route becomes a target that can be dialled. The file that routes are read from is `config.py`'s matter, the
server name that destinations are read from `shared/wire/istio_sni.py`'s. No I/O.

A destination comes from a client that has proved nothing. So a value taken from it can only be a part of a
host name, a path or an audience, never an end of one: `{service}`, `{namespace}` and `{subset}` are single
DNS labels, `{port}` is a number, `{host}` a host name and no IP address, and an empty one is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared.errors import NoRouteError
from shared.net.address import MAX_PORT, Address, check_host_name, is_ipv4, read_ipv6
from shared.ports import HTTPS
from shared.wire import istio_sni
from shared.wire.istio_sni import Destination

PLACEHOLDERS = ("service", "namespace", "port", "subset", "host")
"""What a template may take from a destination."""

MAX_STARS = 8
"""Stars in one host glob; names have few more labels than that."""

MAX_CACHED_TARGETS = 4096
"""Targets kept by destination, some 2.5 MiB. Only names that a route takes get in, so others cannot
push them out; when the table is full it starts anew."""

Method = Literal["POST", "CONNECT"]
TokenKind = Literal["none", "audience", "file"]

_DEFAULT_PORTS = {"https": HTTPS, "http": 80}
# All checks come before lower(), which turns some other letters into ASCII ones.
_GLOB = re.compile(r"[A-Za-z0-9_.*-]+")
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,63}")
# The path of RFC 3986 section 3.3: pchar and "/".
_PATH = re.compile(r"/(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*")
# What of a client's name an error repeats.
_SHOWN_CHARS = 100
# Stands for any placeholder while a template's surroundings are checked; "x" is allowed wherever they are.
_STAND_IN = dict.fromkeys(PLACEHOLDERS, "x")


@dataclass(frozen=True, slots=True)
class Template:
    """A text with placeholders, such as `{service}.a.run.app`."""

    text: str
    """The text as it was written."""

    pieces: tuple[str, ...]
    """Literal text at even places, names of placeholders at odd ones."""

    @classmethod
    def parse(cls, text: str) -> Template:
        """Reads a template. Raises ValueError for unknown placeholders and lone braces."""
        pieces = tuple(re.split(r"\{([^{}]*)\}", text))
        for literal in pieces[::2]:
            if "{" in literal or "}" in literal:
                raise ValueError("a brace has no partner: placeholders look like {service}")
        for name in pieces[1::2]:
            if name not in PLACEHOLDERS:
                close = difflib.get_close_matches(name, PLACEHOLDERS, n=1)
                known = " ".join(f"{{{known}}}" for known in PLACEHOLDERS)
                hint = f"did you mean {{{close[0]}}}?" if close else f"known are {known}"
                raise ValueError(f"unknown placeholder {{{_shown(name)}}}, {hint}")
        return cls(text, pieces)

    @property
    def is_fixed(self) -> bool:
        """Whether nothing in it comes from the destination."""
        return len(self.pieces) == 1

    def expand(self, values: Mapping[str, str]) -> str:
        """The text with the placeholders' values. Raises NoRouteError for an empty one."""
        parts = list(self.pieces)
        for place in range(1, len(parts), 2):
            value = values[parts[place]]
            if not value:
                raise NoRouteError(f"the name has no {parts[place]}, which {_shown(self.text)} needs")
            parts[place] = value
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class TunnelUrl:
    """The URL of a tunnel request: every part a template, the structure fixed."""

    scheme: str
    """`https`, or `http` for HTTP/2 without TLS (h2c)."""

    host: Template
    """A host name, or an IP address without brackets."""

    port: Template
    """A number or `{port}`; the scheme's port if the URL has none."""

    path: Template
    """Begins with a slash."""

    @classmethod
    def parse(cls, text: str) -> TunnelUrl:
        """Reads a URL template. Raises ValueError with the reason, which never repeats user information."""
        scheme, separator, rest = text.partition("://")
        if not separator or scheme not in _DEFAULT_PORTS:
            raise ValueError("must begin with https:// or http://")
        for sign, part in (("?", "query"), ("#", "fragment")):
            if sign in rest:
                raise ValueError(f"must have no {part} ({sign})")
        authority, slash, path = rest.partition("/")
        if "@" in authority:
            raise ValueError("must have no user information (@)")
        if not slash:
            raise ValueError("has no path: did you mean /_hbone/15003 at its end?")
        host, port = _read_authority(authority, _DEFAULT_PORTS[scheme])
        return cls(scheme, host, port, _read_path(slash + path))

    def origin(self) -> Template:
        """`scheme://host`, the audience that Cloud Run's own URLs have."""
        host = f"[{self.host.text}]" if ":" in self.host.text else self.host.text
        return Template.parse(f"{self.scheme}://{host}")


@dataclass(frozen=True, slots=True)
class TokenRule:
    """Which token goes with a tunnel request; none of the fields set: no token."""

    audience: Template | None = None
    """An ID token for this audience is minted."""

    file: Path | None = None
    """The token is in this file, which may appear and change at any time."""


@dataclass(frozen=True, slots=True)
class Route:
    """One rule of the table: either `tunnel` or `forward` is set."""

    host: str
    """A glob on the destination's host: `*` takes one or more characters, dots among them."""

    tunnel: TunnelUrl | None = None
    """Carry the connection in a tunnel request to this URL."""

    forward: Address | None = None
    """Carry the connection as it is, over TCP to this address."""

    connect: Address | None = None
    """Dial here instead of the tunnel URL's host."""

    ca: Path | None = None
    """PEM file with the certificates to trust for the outer TLS; None: the system's."""

    token: TokenRule = TokenRule()
    """The token of the tunnel request."""

    method: Method = "POST"
    """The tunnel request's method."""

    line: int | None = None
    """Where in the file it is, counting from 1; None if it is from elsewhere."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token rule applied to one destination."""

    kind: TokenKind
    value: str = ""
    """The audience or the file; empty for `none`."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where one destination goes. For a `forward` only the first four fields have a meaning."""

    kind: Literal["tunnel", "forward"]
    route: int
    """The route's place in the table, from 0."""

    line: int | None
    """The route's line in its file."""

    dial: Address
    """Where to connect: the forward address, the route's `connect`, or the URL's host and port."""

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

    @property
    def url(self) -> str:
        """The tunnel request's URL."""
        return f"{self.scheme}://{self.authority}{self.path}"


class RouteTable:
    """Routes in order: the first whose glob takes a host decides, even if it then has to refuse it."""

    def __init__(self, routes: Iterable[Route]) -> None:
        """Raises ValueError if a route's glob is wrong."""
        self.routes = tuple(routes)
        self._globs = tuple(compile_glob(route.host) for route in self.routes)
        self._targets: dict[Destination, Target] = {}

    def match(self, destination: Destination) -> Target:
        """The target of a destination. Raises NoRouteError if no route takes it, or the route cannot."""
        target = self._targets.get(destination)
        if target is None:
            target = self._find(destination)
            if len(self._targets) >= MAX_CACHED_TARGETS:
                self._targets.clear()
            self._targets[destination] = target
        return target

    def explain(self, sni: str) -> str:
        """Lines for people: what `sni` says, which routes were tried, and where it goes or why not."""
        lines = [f"name       {_shown(sni)}"]
        try:
            destination = istio_sni.parse(sni)
            lines.append(f"parsed     {_described(destination)}")
            for index, (route, glob) in enumerate(zip(self.routes, self._globs, strict=True)):
                taken = glob.fullmatch(destination.host.lower()) is not None
                lines.append(f"{_place(index, route.line)}: {route.host}: {'takes it' if taken else 'no'}")
                if taken:
                    break
            lines += _directions(self._find(destination))
        except NoRouteError as error:
            lines.append(f"refused    {error}")
        return "\n".join(lines)

    def _find(self, destination: Destination) -> Target:
        try:
            check_host_name(destination.host)
        except ValueError as error:
            raise NoRouteError(f"no route for {_name(destination)}: {error}") from error
        host = destination.host.lower()
        for index, glob in enumerate(self._globs):
            if glob.fullmatch(host):
                try:
                    return _target(index, self.routes[index], destination)
                except NoRouteError as error:
                    place = _place(index, self.routes[index].line)
                    raise NoRouteError(f"{place} cannot take {_name(destination)}: {error}") from error
        raise NoRouteError(f"no route for {_name(destination)}: none of {len(self.routes)} takes its host")


def compile_glob(glob: str) -> re.Pattern[str]:
    """The pattern of a host glob, for lower-case hosts. Raises ValueError with the reason.

    Each star with the text behind it is an atomic group, settled at the first place where that text stands:
    later places could not help the rest of the glob, so trying them would only cost time.
    """
    text = glob.lower()
    if text.startswith(("outbound_.", "inbound_.", "outbound|", "inbound|")):
        raise ValueError("only HOST of outbound_.PORT_.SUBSET_.HOST is matched: leave the rest out")
    if not _GLOB.fullmatch(glob):
        raise ValueError("a host has only letters, digits, dots, hyphens, underscores and *")
    if ".." in text or text.startswith(".") or text.endswith("."):
        raise ValueError("has an empty label: two dots in a row, or one at an end")
    first, *rest = text.split("*")
    if len(rest) > MAX_STARS:
        raise ValueError(f"has {len(rest)} stars, more than {MAX_STARS}")
    if not rest:
        return re.compile(re.escape(first))
    middle = "".join(f"(?>.+?{re.escape(literal)})" for literal in rest[:-1])
    return re.compile(f"{re.escape(first)}{middle}.+{re.escape(rest[-1])}", re.DOTALL)


def _read_authority(authority: str, default_port: int) -> tuple[Template, Template]:
    if authority.startswith("["):
        literal, bracket, rest = authority[1:].partition("]")
        if not bracket:
            raise ValueError("the bracket of the IPv6 address is not closed")
        host = Template(read_ipv6(literal), (read_ipv6(literal),))
    else:
        name, colon, rest = authority.partition(":")
        rest = colon + rest
        check = Template.parse(name).expand(_STAND_IN)
        if not is_ipv4(name):
            check_host_name(check)
        host = Template.parse(name.lower())
    if not rest:
        return host, Template.parse(str(default_port))
    port = rest.removeprefix(":")
    if port == rest or (port != "{port}" and not _is_port(port)):
        raise ValueError(f"the port must be 1..{MAX_PORT} or {{port}}")
    return host, Template.parse(port)


def _read_path(text: str) -> Template:
    path = Template.parse(text)
    example = path.expand(_STAND_IN)
    if not _PATH.fullmatch(example):
        raise ValueError("the path has a character that needs %XX, or a % without two hex digits")
    if any(segment in (".", "..") for segment in example.split("/")):
        raise ValueError("the path must have no . or .. segments")
    return path


def _is_port(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and 1 <= int(text) <= MAX_PORT


def _values(destination: Destination) -> dict[str, str]:
    """The placeholders' values, each checked for what it may consist of."""
    values = {
        "service": destination.service,
        "namespace": destination.namespace,
        "subset": destination.subset,
    }
    for name, value in values.items():
        if value and not _LABEL.fullmatch(value):
            raise NoRouteError(f"its {name} {_shown(value)} is no DNS label")
    port = "" if destination.port is None else str(destination.port)
    if port and not _is_port(port):
        raise NoRouteError(f"its port {port} is not in 1..{MAX_PORT}")
    values |= {"port": port, "host": destination.host}
    return {name: value.lower() for name, value in values.items()}


def _target(index: int, route: Route, destination: Destination) -> Target:
    if route.forward is not None:
        return Target("forward", index, route.line, route.forward)
    if route.tunnel is None:
        raise NoRouteError("the route has neither tunnel nor forward")
    values = _values(destination)
    url = route.tunnel
    host = url.host.expand(values)
    if not url.host.is_fixed:
        try:
            check_host_name(host)
        except ValueError as error:
            raise NoRouteError(f"its tunnel URL has no valid host: {error}") from error
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
        path=url.path.expand(values),
        authority=bracketed if address.port == _DEFAULT_PORTS[url.scheme] else str(address),
        ca=route.ca,
        token=_token(route.token, values),
        method=route.method,
    )


def _token(rule: TokenRule, values: Mapping[str, str]) -> Token:
    if rule.file is not None:
        return Token("file", str(rule.file))
    if rule.audience is not None:
        return Token("audience", rule.audience.expand(values))
    return Token("none")


def _directions(target: Target) -> list[str]:
    if target.kind == "forward":
        return [f"goes to    {target.dial}, as it is, without a tunnel"]
    lines = [f"goes to    {target.method} {target.url}", f"dials      {target.dial}"]
    if target.scheme == "https":
        lines.append(f"trusts     {target.ca or 'the system certificates'}")
    return [*lines, f"token      {target.token.kind} {target.token.value}".rstrip()]


def _described(destination: Destination) -> str:
    port = "none" if destination.port is None else str(destination.port)
    parts = {
        "host": destination.host,
        "port": port,
        "subset": destination.subset or "none",
        "service": destination.service,
        "namespace": destination.namespace or "none",
    }
    return ", ".join(f"{name} {value}" for name, value in parts.items())


def _place(index: int, line: int | None) -> str:
    return f"routes[{index}]" if line is None else f"routes[{index}] (line {line})"


def _name(destination: Destination) -> str:
    """The server name that says this destination, for errors."""
    if destination.port is None:
        return _shown(destination.host)
    return _shown(f"{destination.direction}_.{destination.port}_.{destination.subset}_.{destination.host}")


def _shown(text: str) -> str:
    """At most _SHOWN_CHARS characters of `text`, only visible ASCII ones."""
    cut = text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in cut)

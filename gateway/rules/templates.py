"""URL templates: the fixed structure of a tunnel URL, with places that a destination fills.

What is filled in cannot change the structure of the URL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shared.address import (
    MAX_PORT,
    check_host_name,
    is_ipv4,
    read_ipv6,
)
from shared.errors import NoRouteError
from shared.ports import HTTPS, INBOUND_MTLS

PLACEHOLDERS = ("service", "namespace", "port", "subset", "host")
"""What a template may take from a destination."""

OF_SERVICE = ("service", "namespace")
"""Those that only the name of a Kubernetes Service has."""

SERVICE_FORM = "SERVICE.NAMESPACE.svc[.DOMAIN]"
"""That name, for errors."""

DEFAULT_PORTS = {"https": HTTPS, "http": 80}
"""Of the schemes that a tunnel URL may have."""

DEFAULT_PATH = f"/_hbone/{INBOUND_MTLS}"
"""What a workload that has dialled us is asked for: the mTLS end."""

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
                import difflib

                close = difflib.get_close_matches(name, PLACEHOLDERS, n=1)
                known = " ".join(f"{{{known}}}" for known in PLACEHOLDERS)
                hint = f"did you mean {{{close[0]}}}?" if close else f"known are {known}"
                raise ValueError(f"unknown placeholder {{{shown(name)}}}, {hint}")
        return cls(text, pieces)

    @property
    def names(self) -> frozenset[str]:
        """Its placeholders."""
        return frozenset(self.pieces[1::2])

    @property
    def of_service(self) -> tuple[str, ...]:
        """Those of its placeholders that only a Kubernetes Service fills."""
        return tuple(name for name in OF_SERVICE if name in self.names)

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
                raise NoRouteError(_lacking(parts[place], shown(self.text)))
            parts[place] = value
        return "".join(parts)


def _lacking(name: str, template: str) -> str:
    if name not in OF_SERVICE:
        return f"the name has no {name}, which {template} needs"
    return f"{{{name}}} in {template} needs a name of the form {SERVICE_FORM}"


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
        if not separator or scheme not in DEFAULT_PORTS:
            raise ValueError("must begin with https:// or http://")
        for sign, part in (("?", "query"), ("#", "fragment")):
            if sign in rest:
                raise ValueError(f"must have no {part} ({sign})")
        authority, slash, path = rest.partition("/")
        if "@" in authority:
            raise ValueError("must have no user information (@)")
        if not slash:
            raise ValueError("has no path: did you mean /_hbone/15003 at its end?")
        host, port = _read_authority(authority, DEFAULT_PORTS[scheme])
        return cls(scheme, host, port, _read_path(slash + path))

    @classmethod
    def parse_origin(cls, text: str) -> TunnelUrl:
        """Reads the URL of an origin that is asked with CONNECT, which has no path: as `parse`, but the slash
        may be left out, and nothing may follow it."""
        url = cls.parse(text if "/" in text.partition("://")[2] else f"{text}/")
        if url.path.text != "/":
            raise ValueError("has a path, which CONNECT does not carry: the target is authority")
        return url

    @classmethod
    def parse_registered(cls, text: str) -> TunnelUrl:
        """Reads NAME or NAME/PATH, what a workload has registered and is asked for; without a path it is
        DEFAULT_PATH. Raises ValueError."""
        if "://" in text:
            raise ValueError("is a registered name, with a path or without, and no URL")
        url = cls.parse(f"https://{text if '/' in text else text + DEFAULT_PATH}")
        if url.port.text != str(DEFAULT_PORTS["https"]) or is_ipv4(url.host.text) or ":" in url.host.text:
            raise ValueError("must be a host name without a port, which is what workloads register")
        return url

    def origin(self) -> Template:
        """`scheme://host`, the audience that Cloud Run's own URLs have."""
        host = f"[{self.host.text}]" if ":" in self.host.text else self.host.text
        return Template.parse(f"{self.scheme}://{host}")


def read_target(text: str) -> Template:
    """Reads a template for HOST:PORT, the target of a CONNECT. Raises ValueError."""
    host, port = _read_authority(text, 0)
    if port.text == "0":
        raise ValueError("has no port: write HOST:PORT")
    return Template.parse(f"[{host.text}]:{port.text}" if ":" in host.text else f"{host.text}:{port.text}")


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
    if port == rest or (port != "{port}" and not is_port(port)):
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


def is_port(text: str) -> bool:
    """Whether `text` is a port that can be dialled."""
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and 1 <= int(text) <= MAX_PORT


def shown(text: str) -> str:
    """At most 100 characters of `text`, only visible ASCII ones."""
    cut = text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in cut)

"""Where a tunnel goes, from what the user has written.

`https://HOST[:PORT]/PATH` is the tunnel's URL. `HOST:PORT` means `/_hbone/PORT` on port 443 of HOST, as in
the original. `HOST:443/_hbone/NAME`, which the original misread, means https. What cannot be sent as `:path`
(RFC 9113 section 8.3.1, RFC 3986 section 3) is refused here, because it is not checked again.
"""

from __future__ import annotations

from typing import NamedTuple

from shared.address import Address
from shared.errors import UsageError
from shared.ports import HTTPS
from shared.tunnel.tunnel_request import TUNNEL_PREFIX

_DEFAULT_PORTS = {"https": HTTPS, "http": 80}


class TunnelTarget(NamedTuple):
    """A tunnel URL in its parts. No dataclass: ssh users would wait 0.4 ms for its making."""

    scheme: str
    address: Address
    path: str

    @property
    def host(self) -> str:
        """The name that the certificate must have. A dot at its end is only for resolvers: names in TLS have
        none (RFC 6066 section 3)."""
        return self.address.host.removesuffix(".")

    @property
    def authority(self) -> str:
        """HOST, with the port unless it is the scheme's default."""
        if self.address.port == _DEFAULT_PORTS[self.scheme]:
            return self._bracketed_host
        return f"{self._bracketed_host}:{self.address.port}"

    @property
    def audience(self) -> str:
        """The audience that Cloud Run requires in the token: scheme and host, no port and no path."""
        return f"{self.scheme}://{self._bracketed_host}"

    @property
    def _bracketed_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


def parse(text: str, default_port: str | None = None) -> TunnelTarget:
    """Reads a URL or HOST:PORT; with a `default_port`, of the container, also a URL without a path or HOST.
    Raises UsageError if `text` is none of them."""
    if not text.isascii() or not text.isprintable() or " " in text or "#" in text:
        raise UsageError(
            f"{text!a}: spaces, control characters, # and characters beyond ASCII are not allowed; write %XX"
        )
    scheme, separator, rest = text.partition("://")
    if not separator:
        return _without_scheme(text, default_port)
    scheme = scheme.lower()
    if scheme not in _DEFAULT_PORTS:
        raise UsageError(f"{text}: the scheme must be https or http, not {scheme or 'empty'}")
    host, _, path = rest.partition("/")
    address = _address(text, host, _DEFAULT_PORTS[scheme])
    return TunnelTarget(scheme, address, _path(text, scheme, host, path, default_port))


def _without_scheme(text: str, default_port: str | None) -> TunnelTarget:
    host, slash, path = text.partition("/")
    if slash:
        path = _path(text, "https", host, path, default_port)
        return TunnelTarget("https", _address(text, host, HTTPS), path)
    if default_port is not None and host and not _has_port(host):
        return TunnelTarget("https", _address(text, host, HTTPS), f"{TUNNEL_PREFIX}{default_port}")
    address = _address(text, host, None)
    return TunnelTarget("https", Address(address.host, HTTPS), f"{TUNNEL_PREFIX}{address.port}")


def _path(text: str, scheme: str, host: str, path: str, default_port: str | None) -> str:
    if not path and default_port is not None:
        return f"{TUNNEL_PREFIX}{default_port}"
    if not path:
        raise UsageError(f"{text}: no path; for ssh write {scheme}://{host}{TUNNEL_PREFIX}22")
    return f"/{path}"


def _has_port(host: str) -> bool:
    return ":" in (host.rpartition("]")[2] if host.startswith("[") else host)


def _address(text: str, host: str, default_port: int | None) -> Address:
    if not _has_port(host):
        if default_port is None or not host:
            raise UsageError(f"{text}: write HOST:PORT or a URL such as https://HOST{TUNNEL_PREFIX}22")
        host = f"{host}:{default_port}"
    try:
        address = Address.parse(host)
    except ValueError as error:
        raise UsageError(f"{text}: {error}") from error
    if address.port == 0:
        raise UsageError(f"{text}: port 0 cannot be connected to; write 1..65535")
    return address

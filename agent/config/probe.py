"""What has to answer before krun accepts tunnels: a port, a URL, or nothing."""

from __future__ import annotations

from dataclasses import dataclass

from shared.address import Address
from shared.config.kinds import NONE, TARGET

SCHEME = "http://"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Probe:
    """A port that accepts connections, or a URL that answers 200 to 399, as for Kubernetes' probes; with
    neither nothing has to answer."""

    address: Address | None = None
    url: str = ""

    def __str__(self) -> str:
        return self.url or str(self.address or NONE)


def parse(text: str) -> Probe:
    """HOST:PORT, PORT, a URL or `-`. Raises ValueError."""
    if text == NONE:
        return Probe()
    if text.startswith(SCHEME):
        return Probe(url=_url(text.removeprefix(SCHEME)))
    return Probe(_address(text))


def parse_http(text: str) -> Probe:
    """A URL, or PORT/PATH on this machine: the original's `startupProbe.http`. Raises ValueError."""
    rest = text.removeprefix(SCHEME)
    host, slash, path = rest.partition("/")
    return Probe(url=_url(f"{LOOPBACK}:{host}{slash}{path}" if host.isdigit() else rest))


def _url(rest: str) -> str:
    host, slash, path = rest.partition("/")
    if not rest.isascii() or not rest.isprintable() or " " in rest:
        raise ValueError("a URL has no blanks")
    address = TARGET.parse(host) if ":" in host else Address(host, 80)
    if not address.host:
        raise ValueError(f"must be {SCHEME}HOST:PORT/PATH")
    return f"{SCHEME}{address}/{path}" if slash else f"{SCHEME}{address}/"


def _address(text: str) -> Address:
    address: Address = TARGET.parse(f"{LOOPBACK}:{text}" if text.isdigit() else text)
    return address

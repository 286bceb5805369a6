"""The destination that an Istio client writes into the server name: outbound_.PORT_.SUBSET_.HOST.

Also read: Istio's fallback (the cluster name, `outbound|PORT|SUBSET|HOST`), and a bare name.

The name is the client's claim and ends up in URLs and token audiences (`https://{service}.a.run.app`), so
only the letters of DNS names are accepted: a `/`, `@` or `:` in the host could move a URL's authority, and
with it the gateway's token, elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.address import Address
from shared.errors import SniError

ISTIO_ALPN: frozenset[str] = frozenset(
    {"istio", "istio-peer-exchange", "istio-http/1.0", "istio-http/1.1", "istio-h2"}
)
"""Istio's AUTO_PASSTHROUGH gateway accepts a hello only with one of these among its ALPN names: they say that
mesh mTLS follows."""

MAX_NAME_CHARS = 255
"""Longest name accepted: a server name's limit in client_hello, and in BoringSSL and OpenSSL."""

# Istio's key is "DIRECTION_.PORT_.SUBSET_.HOST"; its fallback, the cluster name, has "|" for "_.".
# Splitting stops after three, as Istio's own parser does: a host may contain "_.".
_SEPARATORS = ("_.", "|")
_DIRECTIONS = ("outbound", "inbound")
_SPLITS = 3

# No leading zero: Istio writes none, and a second spelling of a port serves nobody.
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_MAX_PORT = 65535
# Istio accepts a DNS-1123 label as the name of a subset.
_SUBSET = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", re.ASCII)
# DNS labels, with "_" as resolvers accept it, and none of them empty.
_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a client wants to go, as far as the server name tells; all in lower case."""

    host: str
    """The service's name, such as `hello.demo.svc.cluster.local`; never empty."""

    port: int | None
    """The service's port, 1..65535; None for a bare name."""

    subset: str
    """The DestinationRule's subset; empty if there is none."""

    direction: str
    """`outbound`, `inbound`, or empty for a bare name."""

    @property
    def service(self) -> str:
        """The name of the Kubernetes Service that the host is, empty if it is none."""
        return self._service_labels[0]

    @property
    def namespace(self) -> str:
        """The Service's namespace, empty if the host is no Service."""
        return self._service_labels[1]

    @property
    def _service_labels(self) -> tuple[str, str]:
        """Of SERVICE.NAMESPACE.svc, with or without a domain. Of no other form: of `admin.prod.demo.svc` the
        second label is no namespace. In the domain no label is `svc` again, as in the name
        `admin.prod.svc.demo.svc`, which ends like one of the namespace demo."""
        labels = self.host.split(".")
        if labels[2:3] != ["svc"] or "svc" in labels[3:]:
            return "", ""
        return labels[0], labels[1]


def server_name(service: Address) -> str:
    """The name by which a sidecar asks for a service, HOST:PORT, without a subset (Istio's
    BuildDNSSrvSubsetKey). It may have more than `MAX_NAME_CHARS`."""
    return f"outbound_.{service.port}_._.{service.host}"


def parse(server_name: str) -> Destination:
    """Reads a server name, in Istio's form, as a cluster name or bare (Istio's BuildDNSSrvSubsetKey).

    Raises SniError if the name starts like one of Istio's and does not go on so, or has other characters
    than a DNS name.
    """
    if len(server_name) > MAX_NAME_CHARS:
        raise SniError(f"server name: {len(server_name)} characters, more than {MAX_NAME_CHARS}")
    if not server_name.isascii():  # before lower(), which turns some other letters into ASCII ones
        raise SniError(f"server name {server_name!a}: not ASCII")
    name = server_name.lower()
    for direction in _DIRECTIONS:
        for separator in _SEPARATORS:
            if name.startswith(direction + separator):
                return _parse_key(name, separator)
    return Destination(_checked_host(name, name), None, "", "")


def _parse_key(name: str, separator: str) -> Destination:
    parts = name.split(separator, _SPLITS)
    if len(parts) != _SPLITS + 1:
        form = separator.join(("outbound", "PORT", "SUBSET", "HOST"))
        raise SniError(f"server name {name!a}: not of the form {form}")
    direction, port, subset, host = parts
    if not _PORT.fullmatch(port) or int(port) > _MAX_PORT:
        raise SniError(f"server name {name!a}: port {port!a} is not in 1..{_MAX_PORT}")
    if subset and not _SUBSET.fullmatch(subset):
        raise SniError(f"server name {name!a}: subset {subset!a} is no DNS label")
    return Destination(_checked_host(host, name), int(port), subset, direction)


def _checked_host(host: str, name: str) -> str:
    if not _HOST.fullmatch(host):
        raise SniError(f"server name {name!a}: host {host!a} is no DNS name")
    return host

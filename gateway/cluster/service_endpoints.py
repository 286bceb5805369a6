"""The ready endpoints of Services, from Services and their EndpointSlices. No I/O.

A Service's port has a name, and its EndpointSlices have the port's number at the endpoints by that name. An
endpoint that is terminating still serves connections that it has, but gets no new ones (Kubernetes,
"EndpointSlices", conditions).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shared.address import Address

SERVICE_LABEL = "kubernetes.io/service-name"
"""On an EndpointSlice: whose it is."""

MAX_ENDPOINTS = 1000
"""Of one Service that are handed over."""

Key = tuple[str, str]
"""Namespace and name."""


@dataclass(frozen=True, slots=True)
class EndpointSlice:
    """What is kept of an EndpointSlice."""

    service: str
    ports: tuple[tuple[str, int], ...]
    """Name and number."""
    addresses: tuple[str, ...]
    """IP addresses of the endpoints that are ready."""

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> EndpointSlice | None:
        """Of an object as the API server has it; None if it is no Service's, or has names for addresses."""
        service = (found["metadata"].get("labels") or {}).get(SERVICE_LABEL)
        if not service or found.get("addressType") == "FQDN":
            return None
        ports = tuple(
            (str(port.get("name") or ""), int(port["port"]))
            for port in found.get("ports") or []
            if port.get("port") and port.get("protocol", "TCP") == "TCP"
        )
        # Unknown readiness counts as ready (the API's own words on `ready`).
        ready = [
            address
            for endpoint in found.get("endpoints") or []
            if (endpoint.get("conditions") or {}).get("ready") is not False
            for address in endpoint["addresses"][:1]
        ]
        return cls(str(service), ports, tuple(ready))


class ServiceEndpoints:
    """The table of all Services that may be reached, kept current Service by Service."""

    def __init__(self, domain: str) -> None:
        self._domain = domain
        self.table: dict[str, dict[str, list[str]]] = {}

    def update(self, key: Key, ports: Mapping[str, int] | None, slices: Iterable[EndpointSlice]) -> bool:
        """Takes a Service over: `ports` by their names, None if there is no such Service or it may not be
        reached. Returns whether that changes the table."""
        namespace, service = key
        host = f"{service}.{namespace}.svc.{self._domain}"
        found = _by_port(ports, slices) if ports else {}
        if self.table.get(host, {}) == found:
            return False
        if found:
            self.table[host] = found
        else:
            del self.table[host]
        return True


def _by_port(ports: Mapping[str, int], slices: Iterable[EndpointSlice]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in slices:
        for name, number in one.ports:
            if name in ports:
                ends = found.setdefault(str(ports[name]), [])
                ends += [str(Address(address, number)) for address in one.addresses]
    return {port: sorted(set(ends))[:MAX_ENDPOINTS] for port, ends in found.items() if ends}


def ports_of(found: Mapping[str, Any]) -> dict[str, int]:
    """The TCP ports of a Service, by their names."""
    ports = (found.get("spec") or {}).get("ports") or []
    return {
        str(port.get("name") or ""): int(port["port"])
        for port in ports
        if port.get("protocol", "TCP") == "TCP"
    }

"""What Istio has to be told for a Service that leads to hgate: manifests, without I/O.

What each is for, and why there are no others: docs/decisions/0061. In short, for each Service:

- ServiceEntry and WorkloadEntry: its endpoint is hgate, and the certificate there is the workload's;
- DestinationRule: clients speak mTLS whatever the mesh's default is, and spread over instances;
- PeerAuthentication and Sidecar: how the workload's own Envoy serves what comes through the tunnel;
- for ambient clients a WorkloadEntry on a network of its own;
- for the original's labels a Service of the short name and a VirtualService.

All are in the Service's own namespace. Names begin with `hbone-`, so that nobody else's object is meant.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.address import Address
from shared.cluster.service_annotations import (
    AMBIENT_NETWORK,
    AMBIENT_SERVICE,
    EGRESS,
    ENDPOINT_OF,
    HGATE,
    MANAGED_BY,
    NO_SIDECAR,
    SERVICE,
    WORKLOAD,
    WORKLOAD_ACCOUNT,
    check_value,
)
from shared.ports import APP, INBOUND_MTLS

Manifest = dict[str, Any]

NO_EGRESS = "~/*"
"""The mesh's services are not given to the workload's Envoy. In interception mode NONE it would listen on the
port of each, also on the app's own, and would never get ready."""

DEFAULT_ACCOUNT = "default"
"""krun's, where WORKLOAD_SERVICE_ACCOUNT says nothing."""

REQUESTS_PER_CONNECTION = 20
"""Then a client takes a new connection, and with it maybe another instance: what it sends inside of one mTLS
connection is one request to Cloud Run."""

IDLE_S = 60
"""An idle connection keeps its instance up and billed."""

MAX_CONNECTION_S = 3000
"""Below Cloud Run's longest request timeout (3600 s), which would cut a connection in mid-request."""

# Istio's names of protocols (its API reference, "ServiceEntry", Port) by what ports of Services are called
# ("Protocol Selection"). A port of another name is sniffed at.
_PROTOCOLS = {
    "http": "HTTP",
    "http2": "HTTP2",
    "kubernetes.io/h2c": "HTTP2",
    "grpc": "GRPC",
    "grpc-web": "GRPC-Web",
    "https": "HTTPS",
    "tls": "TLS",
    "tcp": "TCP",
    "mongo": "MONGO",
}
_HTTP2_ONLY = {"HTTP2", "GRPC"}
_HTTP = _HTTP2_ONLY | {"HTTP", "GRPC-Web"}

KINDS: Mapping[str, tuple[str, str]] = {
    "Service": ("v1", "services"),
    "ServiceEntry": ("networking.istio.io/v1", "serviceentries"),
    "WorkloadEntry": ("networking.istio.io/v1", "workloadentries"),
    "DestinationRule": ("networking.istio.io/v1", "destinationrules"),
    "VirtualService": ("networking.istio.io/v1", "virtualservices"),
    "Sidecar": ("networking.istio.io/v1", "sidecars"),
    "PeerAuthentication": ("security.istio.io/v1", "peerauthentications"),
}
"""The kinds that are made, with API version and plural; each can exist only in a namespace."""


@dataclass(frozen=True, slots=True)
class ServicePort:
    """A TCP port of a Service."""

    name: str
    number: int
    app_protocol: str = ""

    @property
    def protocol(self) -> str:
        """Istio's name of what is spoken there; empty: to be found out."""
        if self.app_protocol:
            return _PROTOCOLS.get(self.app_protocol.lower(), "")
        name = self.name.lower()
        return next((_PROTOCOLS[word] for word in (name, *_prefixes(name)) if word in _PROTOCOLS), "")


@dataclass(frozen=True, slots=True)
class MeshService:
    """A Service without endpoints of its own, and who answers for it."""

    name: str
    namespace: str
    ports: tuple[ServicePort, ...]
    gateways: tuple[Address, ...]
    """Of hgate's port 15442 or 15443, IP addresses: Istio looks no name up for the endpoints of a Service."""

    workload: str
    """The label `app` of the workload outside."""

    workload_account: str = DEFAULT_ACCOUNT
    """The Kubernetes service account in its certificate, which clients demand."""

    egress: tuple[str, ...] = (NO_EGRESS,)
    """Of the workload's Sidecar; empty: none is made."""

    ambient_network: str = ""
    """Where ambient clients find the workload; empty: there are none."""

    short_name: str = ""
    """Another name in the same namespace, for HTTP; empty: none."""

    domain: str = "cluster.local"

    @property
    def host(self) -> str:
        """Its name in the mesh."""
        return f"{self.name}.{self.namespace}.svc.{self.domain}"


def of_annotations(
    told: Mapping[str, str],
    name: str,
    namespace: str,
    ports: Sequence[ServicePort],
    gateways: Sequence[Address],
    *,
    short_name: str = "",
    domain: str = "cluster.local",
) -> MeshService:
    """What a Service with these annotations is to the mesh. Raises ValueError with annotation and reason."""

    def value(key: str, otherwise: str) -> str:
        if (text := told.get(key)) is None:
            return otherwise
        try:
            return check_value(key, text)
        except ValueError as error:
            raise ValueError(f"{key} {error}") from error

    egress = value(EGRESS, NO_EGRESS)
    return MeshService(
        name=name,
        namespace=namespace,
        ports=tuple(ports),
        gateways=tuple(gateways),
        workload=value(WORKLOAD, short_name or name),
        workload_account=value(WORKLOAD_ACCOUNT, DEFAULT_ACCOUNT),
        egress=() if egress == NO_SIDECAR else tuple(egress.split(",")),
        ambient_network=value(AMBIENT_NETWORK, ""),
        short_name=short_name,
        domain=domain,
    )


def manifests(service: MeshService, owner_uid: str = "") -> list[Manifest]:
    """All that is to be there beside the Service, in the order in which it is best made.

    `owner_uid` is the Service's; with it the cluster removes them all when the Service is removed. Without it
    they have no owner, for those who keep manifests in a repository.
    """
    made = [_service_entry(service), *(_at_gateway(service, one) for one in service.gateways)]
    made += [_destination_rule(service), _peer_authentication(service)]
    if service.egress:
        made.append(_sidecar(service))
    if service.ambient_network:
        made.append(_on_network(service))
    if service.short_name:
        made += _short(service)
    if owner_uid:
        owner = {"apiVersion": "v1", "kind": "Service", "name": service.name, "uid": owner_uid}
        for each in made:
            each["metadata"]["ownerReferences"] = [owner]
    return made


def path_of(manifest: Mapping[str, Any]) -> str:
    """Where an object is, below the API server's URL."""
    version, plural = KINDS[manifest["kind"]]
    about = manifest["metadata"]
    group = "apis" if "/" in version else "api"
    return f"/{group}/{version}/namespaces/{about['namespace']}/{plural}/{about['name']}"


def ambient_fields(name: str) -> tuple[dict[str, str], dict[str, str]]:
    """What a Service has to have for ambient clients: labels, and the selector of its workload. It selects no
    pod."""
    return {"istio.io/global": "true"}, {AMBIENT_SERVICE: name}


def _prefixes(name: str) -> tuple[str, ...]:
    """`grpc-web` and `grpc` of grpc-web-api."""
    parts = name.split("-")
    return tuple("-".join(parts[:count]) for count in (2, 1) if len(parts) >= count)


def _made(service: MeshService, kind: str, spec: Manifest, suffix: str = "", name: str = "") -> Manifest:
    about = {
        "name": name or f"hbone-{service.name}{suffix}",
        "namespace": service.namespace,
        "labels": {MANAGED_BY: HGATE, SERVICE: service.name},
    }
    return {"apiVersion": KINDS[kind][0], "kind": kind, "metadata": about, "spec": spec}


def _service_entry(service: MeshService) -> Manifest:
    spec = {
        "hosts": [service.host],
        "location": "MESH_INTERNAL",
        "resolution": "STATIC",
        "ports": [_port(one) for one in service.ports],
        "workloadSelector": {"labels": {ENDPOINT_OF: service.name}},
    }
    return _made(service, "ServiceEntry", spec)


def _port(port: ServicePort) -> Manifest:
    protocol = {"protocol": port.protocol} if port.protocol else {}
    return {"name": port.name, "number": port.number, **protocol}


def _at_gateway(service: MeshService, gateway: Address) -> Manifest:
    spec = {
        "address": gateway.host,
        "ports": {one.name: gateway.port for one in service.ports},
        # Automatic mTLS goes by this label, where there is no DestinationRule or another one.
        "labels": {ENDPOINT_OF: service.name, "security.istio.io/tlsMode": "istio"},
        "serviceAccount": service.workload_account,
    }
    # An address has no `:` in an object's name, and none ends in one that is written in full.
    place = ipaddress.ip_address(gateway.host).exploded.replace(":", "-")
    return _made(service, "WorkloadEntry", spec, f"-{place}-{gateway.port}")


def _destination_rule(service: MeshService) -> Manifest:
    pool = {
        "http": {"maxRequestsPerConnection": REQUESTS_PER_CONNECTION, "idleTimeout": f"{IDLE_S}s"},
        "tcp": {"maxConnectionDuration": f"{MAX_CONNECTION_S}s"},
    }
    spec = {
        "host": service.host,
        "trafficPolicy": {"tls": {"mode": "ISTIO_MUTUAL"}, "connectionPool": pool},
    }
    return _made(service, "DestinationRule", spec)


def _workload_labels(service: MeshService) -> Manifest:
    return {"app": service.workload}


def _peer_authentication(service: MeshService) -> Manifest:
    spec = {
        "selector": {"matchLabels": _workload_labels(service)},
        # For this port only, so that pods with the same label go on as before.
        "portLevelMtls": {str(INBOUND_MTLS): {"mode": "STRICT"}},
    }
    return _made(service, "PeerAuthentication", spec)


def _sidecar(service: MeshService) -> Manifest:
    ingress = {
        "port": {"number": INBOUND_MTLS, "name": "mesh", **_served(service)},
        "bind": "127.0.0.1",
        "defaultEndpoint": f"127.0.0.1:{APP}",
        "captureMode": "NONE",
    }
    spec = {
        "workloadSelector": {"labels": _workload_labels(service)},
        "egress": [{"hosts": list(service.egress)}],
        "ingress": [ingress],
    }
    return _made(service, "Sidecar", spec)


def _served(service: MeshService) -> Manifest:
    """What all ports speak. Where they differ, Envoy finds it out for each connection."""
    spoken = {one.protocol for one in service.ports}
    if spoken <= _HTTP:
        return {"protocol": "HTTP2" if spoken <= _HTTP2_ONLY else "HTTP"}
    return {} if spoken & {"", *_HTTP} else {"protocol": "TCP"}


def _on_network(service: MeshService) -> Manifest:
    """Without an address: istiod gives clients the network's gateway, and asks for a tunnel to the Service's
    name."""
    labels = {AMBIENT_SERVICE: service.name, "networking.istio.io/tunnel": "http"}
    spec = {
        "network": service.ambient_network,
        "labels": labels,
        "serviceAccount": service.workload_account,
    }
    return _made(service, "WorkloadEntry", spec, "-ambient")


def _short(service: MeshService) -> list[Manifest]:
    ports = [one for one in service.ports if one.protocol in _HTTP]
    if not ports:
        return []
    name = service.short_name
    host = f"{name}.{service.namespace}.svc.{service.domain}"
    told: list[Manifest] = [{"name": one.name, "port": one.number, "protocol": "TCP"} for one in ports]
    for one, port in zip(told, ports, strict=True):
        if port.app_protocol:
            one["appProtocol"] = port.app_protocol
    route = {"route": [{"destination": {"host": service.host}}]}
    return [
        _made(service, "Service", {"ports": told}, name=name),
        _made(service, "VirtualService", {"hosts": [host], "http": [route]}),
    ]

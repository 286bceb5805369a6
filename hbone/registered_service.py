"""The Service that `hbone register` writes or prints: its name, its ports, its annotations.

Pure: it reads no file and asks nobody.
"""

from __future__ import annotations

import argparse
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hbone.name_in_url import name_in
from shared import ports
from shared.address import Address
from shared.cluster.mesh_objects import (
    Manifest,
    ServicePort,
    ambient_fields,
    manifests,
    of_annotations,
)
from shared.cluster.service_annotations import (
    ACCOUNT,
    AMBIENT_NETWORK,
    AUDIENCE,
    COLD_START,
    EGRESS,
    METHOD,
    TARGET_PORT,
    URL,
    WORKLOAD,
    WORKLOAD_ACCOUNT,
    check_value,
    origin_of,
    tunnel_of,
)
from shared.errors import UsageError

CHOICES: Mapping[str, tuple[str, str, str]] = {
    "--audience": (AUDIENCE, "AUDIENCE", "audience of hgate's token (default: URL)"),
    "--service-account": (
        ACCOUNT,
        "EMAIL",
        "Google service account whose token hgate sends, by impersonation (default: hgate's own)",
    ),
    "--target-port": (
        TARGET_PORT,
        "PORT",
        f"where the tunnel ends in the container: a port, or a target's name (default: {ports.INBOUND_MTLS})",
    ),
    "--method": (METHOD, "METHOD", "of the tunnel's request: POST or CONNECT (default: POST)"),
    "--cold-start": (
        COLD_START,
        "DURATION",
        "how long a tunnel waits for the service, if it scales to zero, such as 60s (default: not at all)",
    ),
    "--workload": (
        WORKLOAD,
        "NAME",
        "label app of the workload, krun's WORKLOAD_NAME (default: the Service's name)",
    ),
    "--workload-account": (
        WORKLOAD_ACCOUNT,
        "NAME",
        "Kubernetes service account in the workload's certificate, krun's WORKLOAD_SERVICE_ACCOUNT "
        "(default: default)",
    ),
    "--egress": (
        EGRESS,
        "HOSTS",
        "what an Envoy under pilot-agent beside the app knows of the mesh: NAMESPACE/HOST, with commas, such "
        "as */*; none: no Sidecar is made (default: ~/*, nothing)",
    ),
    "--ambient-network": (
        AMBIENT_NETWORK,
        "NETWORK",
        "network by which ambient clients reach the workload (default: they do not)",
    ),
}
"""The flags that become annotations: which one, and the flag's metavar and help."""

DEFAULT_PORT = "http:80"

_LABEL = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""The name of a Service, or of its port (RFC 1035)."""


@dataclass(frozen=True, slots=True)
class RegisteredService:
    """What the command line asks for."""

    name: str
    namespace: str
    ports: tuple[ServicePort, ...]
    annotations: Mapping[str, str]

    @property
    def is_ambient(self) -> bool:
        return AMBIENT_NETWORK in self.annotations

    @property
    def tunnel(self) -> str:
        """The URL of its tunnels."""
        return tunnel_of(self.annotations)

    def manifest(self) -> Manifest:
        """The Service."""
        about: Manifest = {"name": self.name, "namespace": self.namespace}
        spec: Manifest = {
            "ports": [{"name": one.name, "port": one.number, "protocol": "TCP"} for one in self.ports]
        }
        if self.is_ambient:
            about["labels"], spec["selector"] = ambient_fields(self.name)
        about["annotations"] = dict(self.annotations)
        return {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": spec}

    def all_manifests(self, gateways: Sequence[Address], domain: str) -> list[Manifest]:
        """The Service, and what hgate would register for it."""
        service = of_annotations(
            self.annotations, self.name, self.namespace, self.ports, gateways, domain=domain
        )
        return [self.manifest(), *manifests(service)]

    def route(self, domain: str) -> Manifest:
        """The route for a gateway that follows no cluster, as hgate's file has it."""
        told = self.annotations
        token = {"audience": told.get(AUDIENCE, told[URL])}
        if ACCOUNT in told:
            token["service_account"] = told[ACCOUNT]
        route: dict[str, Any] = {"host": f"{self.name}.{self.namespace}.svc.{domain}", "tunnel": self.tunnel}
        if METHOD in told:
            route["method"] = told[METHOD]
        if COLD_START in told:
            route["cold_start"] = told[COLD_START]
        return {**route, "token": token}


def read(options: argparse.Namespace, namespace: str) -> RegisteredService:
    """Raises UsageError if the command line names no service, or a wrong one."""
    if options.url is None:
        raise UsageError("URL is missing: https://HOST of the service outside of the cluster")
    try:
        url = check_value(URL, options.url)
    except ValueError as error:
        raise UsageError(f"URL {options.url} {error}") from error
    told = {URL: url}
    for flag, (key, _, _) in CHOICES.items():
        text: str | None = getattr(options, flag[2:].replace("-", "_"))
        if text is not None:
            try:
                told[key] = check_value(key, text)
            except ValueError as error:
                raise UsageError(f"{flag} {text} {error}") from error
    return RegisteredService(name_of(options), namespace, _ports(options.port or [DEFAULT_PORT]), told)


def name_of(options: argparse.Namespace) -> str:
    """The Service's name: --name, or the one in URL. Raises UsageError if there is none."""
    if options.name is not None:
        if not _LABEL.fullmatch(options.name):
            raise UsageError(f"--name {options.name} is no name of a Service: a-z, 0-9 and inner hyphens")
        return str(options.name)
    if options.url is None:
        raise UsageError("--name is missing: which Service is meant?")
    try:
        name = name_in(origin_of(options.url).host)
    except ValueError as error:
        raise UsageError(f"URL {options.url} {error}") from error
    if not _LABEL.fullmatch(name):
        raise UsageError(f"--name is missing: {name!r}, of the URL, is no name of a Service")
    return name


def gateways(texts: Sequence[str]) -> list[Address]:
    """Reads ADDRESS[:PORT] or [ADDRESS][:PORT]. Raises UsageError."""
    found = []
    for text in texts:
        try:
            host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
            found.append(Address(str(ipaddress.ip_address(host)), ports.SNI))
            continue
        except ValueError:
            pass
        try:
            address = Address.parse(text)
            ipaddress.ip_address(address.host)
        except ValueError:
            raise UsageError(
                f"--gateway {text} is no IP address, with or without :PORT; Istio looks up no names here: "
                "kubectl get service hgate tells the address"
            ) from None
        found.append(address)
    return found


def _ports(texts: Sequence[str]) -> tuple[ServicePort, ...]:
    found = []
    for text in texts:
        name, separator, number = text.rpartition(":")
        if not separator:
            name = "http" if len(texts) == 1 else f"http-{number}"
        if not _LABEL.fullmatch(name) or not re.fullmatch(r"[0-9]{1,5}", number):
            raise UsageError(f"--port {text} is no PORT or NAME:PORT, such as grpc:8083")
        if not 0 < int(number) < 1 << 16:
            raise UsageError(f"--port {text}: a port is 1 to 65535")
        found.append(ServicePort(name, int(number)))
    if len({one.name for one in found}) < len(found) or len({one.number for one in found}) < len(found):
        raise UsageError("--port: two ports have the same name or number")
    return tuple(found)

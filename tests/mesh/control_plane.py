"""etcd, kube-apiserver and istiod, on the addresses of the control plane's place."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

from shared.address import Address
from shared.credentials.certificates import certificate_writer
from shared.credentials.certificates.certificate_writer import Contents
from shared.credentials.certificates.istio_ca import IstioCa
from tests.kube import run as kube
from tests.mesh.build import Programs
from tests.mesh.objects import Objects, kubeconfig, manifest, read
from tests.mesh.places import BRIDGE, PLACES, Process, Processes, until
from tests.support.certificate_requests import gives, key_pem, new_key, request_pem

ADDRESS = PLACES[BRIDGE]

START_S = 60.0
"""istiod is ready within three seconds on an idle machine."""

READY = "http://127.0.0.1:8080/ready"

ISTIOD = {
    "POD_NAME": "istiod-0",
    "POD_NAMESPACE": "istio-system",
    "SERVICE_ACCOUNT": "istiod",
    "REVISION": "default",
    "CLUSTER_ID": "Kubernetes",
    "PILOT_CERT_PROVIDER": "istiod",
    # Sidecars send HBONE to workloads with the label networking.istio.io/tunnel.
    "PILOT_ENABLE_AMBIENT": "true",
    "PILOT_PREFER_SENDING_HBONE": "true",
    # Filters that only Istio's own build of Envoy has: Envoy of PyPI would reject every cluster.
    "PILOT_ENABLE_ALPN_FILTER": "false",
    "PILOT_ENABLE_METADATA_EXCHANGE": "false",
    "PILOT_ENABLE_TELEMETRY_LABEL": "false",
    # What is not there to be served.
    "PILOT_ENABLE_GATEWAY_API": "false",
    "PILOT_ENABLE_ANALYSIS": "false",
    "PILOT_ENABLE_IP_AUTOALLOCATE": "false",
}


@dataclass
class ControlPlane:
    """A cluster with Istio. `folder` has its files, `root` is that of the mesh's certificates (PEM)."""

    programs: Programs
    folder: Path
    objects: Objects
    processes: Processes
    istiod: Process

    @property
    def xds(self) -> str:
        """istiod's port with TLS, HOST:PORT."""
        return f"{ADDRESS}:15012"

    @property
    def plaintext_xds(self) -> str:
        """Its port without TLS."""
        return f"{ADDRESS}:15010"

    @property
    def root(self) -> str:
        """What istiod has published to the workloads' namespaces."""

        def published() -> str | None:
            there = self.objects.get("/api/v1/namespaces/demo/configmaps/istio-ca-root-cert")
            return str(there["data"]["root-cert.pem"]) if there else None

        return until(published, START_S, "the mesh's root in namespace demo")

    def certify(self, namespace: str, account: str, folder: Path) -> None:
        """Writes a certificate of the account's, its key and the mesh's roots, as krun and pilot-agent do."""
        key, roots = new_key(), self.root.encode()
        token = self.objects.token(namespace, account, "istio-ca")
        authority = IstioCa(Address(ADDRESS, 15012), roots=lambda: roots, token=gives(token))
        signed = asyncio.run(authority.sign(request_pem(key), 24 * 3600))
        certificate_writer.write(folder, Contents(signed.chain_pem, key_pem(key), roots))

    def kubeconfig(self, token: str, name: str) -> Path:
        """A kubeconfig file for the owner of `token`."""
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(kubeconfig(self.objects.server, token, "demo"))
        return path

    def start_istiod(self) -> None:
        """Again, after `istiod.end()`."""
        self.istiod = _istiod(self.programs, self.folder, self.processes)


@contextmanager
def running(programs: Programs, folder: Path) -> Iterator[ControlPlane]:
    """The control plane, with the namespaces and accounts of manifests/base.yaml."""
    (folder / "api").mkdir()
    with kube.running(programs.api_server, folder / "api", ADDRESS) as server:
        objects = Objects(server, kube.ADMIN)
        objects.apply(read(programs.crds))
        objects.apply(manifest("base"))
        (folder / "admin.kubeconfig").write_text(kubeconfig(server, kube.ADMIN, "default"))
        processes = Processes(folder)
        try:
            istiod = _istiod(programs, folder, processes)
            yield ControlPlane(programs, folder, objects, processes, istiod)
        finally:
            processes.end()


def _istiod(programs: Programs, folder: Path, processes: Processes) -> Process:
    own = folder / "istiod"
    own.mkdir(exist_ok=True)
    command = [
        *(programs.istiod, "discovery", f"--kubeconfig={folder / 'admin.kubeconfig'}"),
        *(
            "--domain=cluster.local",
            "--httpAddr=127.0.0.1:8080",
            "--httpsAddr=",
            f"--grpcAddr={ADDRESS}:15010",
        ),
        *(f"--secureGRPCAddr={ADDRESS}:15012", "--monitoringAddr=127.0.0.1:15014"),
    ]
    istiod = processes.start("istiod", BRIDGE, command, ISTIOD, cwd=own)
    processes.ready(istiod, lambda: answers(READY), START_S)
    return istiod


def answers(url: str) -> bool:
    """Whether a GET is answered with 200, in the place that this process is in."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False

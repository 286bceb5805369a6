"""One gateway for ambient clients and sidecars, before one service on Cloud Run: all of it as processes.

    double HBONE → hgate's HBONE port ┐                             ┌ inner HBONE (15008) ┐
    mTLS by SNI  → hgate's SNI port   ┴→ the Cloud Run stand-in → krun                    ┴→ app
                                                                    └ the mTLS end (15003) ┘

Owned here: certificates, rules and routes. What clients and apps do is the tests'.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hbone.demo.processes import Process
from shared.address import Address
from shared.net.tls import certificate_folder, contexts
from shared.trust.spiffe import SpiffeId
from tests.path.hbone_peers import Hgate, hgate
from tests.path.krun_peers import krun
from tests.support.double_hbone import Ztunnel
from tests.support.hbone_port import CALLER, GATEWAY, TRUST_DOMAIN, Mesh
from tests.support.http2_peer import Service
from tests.support.network import reserved_port
from tests.support.world import CONCURRENCY, printed

HOST = "hello.demo.svc.cluster.local"
AUTHORITY = f"{HOST}:8080"
SNI = f"outbound_.8080_._.{HOST}"
SERVICE_URL = "https://hello-123456789012.us-central1.run.app"

OLD_HOST = "old.demo.svc.cluster.local"
OLD_AUTHORITY = f"{OLD_HOST}:8080"
OLD_NAME = "old-123456789012.us-central1.run.app"

OTHER_AUTHORITY = "other.demo.svc.cluster.local:8080"
"""Of a service that the route takes and hgate's rules allow, and krun does not know: it is another's."""

HELLO = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "hello")
PARTNER = SpiffeId.of_workload(TRUST_DOMAIN, "partner", "client")
"""Whom hgate allows, and krun does not."""
STRANGER = SpiffeId.of_workload(TRUST_DOMAIN, "other", "stranger")
"""Whom hgate does not allow."""


@dataclass(frozen=True, slots=True)
class AmbientWorld:
    """The running processes."""

    mesh: Mesh
    gateway: Hgate
    krun: Process
    cloudrun: Process
    old_port: int
    """Where OLD_HOST's service is looked for; see `old_service`."""

    def ztunnel(self, identity: SpiffeId = CALLER) -> AbstractAsyncContextManager[Ztunnel]:
        """A ztunnel of this member."""
        assert self.gateway.hbone is not None
        return Ztunnel.of(self.gateway.hbone.port, self.mesh.tls(self.mesh.member(identity)))

    def sidecar(self, identity: SpiffeId = CALLER) -> ssl.SSLContext:
        """What a sidecar of this member shows and wants of the service."""
        context = self.mesh.tls(self.mesh.member(identity))
        context.set_alpn_protocols(["istio-peer-exchange", "istio"])
        return context

    def old_service(self) -> AbstractAsyncContextManager[Service]:
        """OLD_HOST's service, whose requests the test answers."""
        folder = self.mesh.folder_of(SpiffeId.of_workload(TRUST_DOMAIN, "run", "old"))
        certificates, key, _ = certificate_folder.find(folder).all
        return Service.listening(contexts.server_context(certificates, key), self.old_port)


@contextmanager
def running(folder: Path, app: Address) -> Iterator[AmbientWorld]:
    """Runs it in `folder`, before an app that listens on `app`, until the block ends; each process has to
    stop in order."""
    mesh = Mesh(folder)
    old = SpiffeId.of_workload(TRUST_DOMAIN, "run", "old")
    _, _, old_ca = certificate_folder.find(mesh.member(old, dns_names=[OLD_NAME])).all
    with ExitStack() as block:
        old_port = block.enter_context(reserved_port())
        process, container = block.enter_context(krun(folder, **_krun(mesh, app)))
        cloudrun = Process("cloudrun", _cloudrun(folder, container), {}, folder)
        block.callback(cloudrun.stop)
        front_end = {
            "connect": printed(cloudrun, "CLOUDRUN_ADDRESS"),
            "ca": printed(cloudrun, "CLOUDRUN_CA"),
            "token": {"audience": SERVICE_URL},
        }
        routes = [
            {
                "host": OLD_HOST,
                "tunnel": f"https://{OLD_NAME}/_hbone/15008",
                "connect": f"127.0.0.1:{old_port}",
                "ca": str(old_ca),
                "token": {"audience": SERVICE_URL},
                "inner": "hbone",
            },
            {
                "host": "*.demo.svc.cluster.local",
                "tunnel": f"{SERVICE_URL}/_hbone/15008",
                **front_end,
                "inner": "hbone",
            },
            {"host": HOST, "tunnel": f"{SERVICE_URL}/_hbone/15003", **front_end},
        ]
        port = {
            "certificates": str(mesh.member(GATEWAY)),
            "rules": [
                {"from": [str(CALLER)], "to": ["*.demo.svc.cluster.local:8080"]},
                {"from": [str(PARTNER)], "to": [AUTHORITY]},
            ],
        }
        environ = {"GCE_METADATA_HOST": printed(cloudrun, "GCE_METADATA_HOST")}
        gateway = block.enter_context(hgate(folder, routes=routes, hbone=port, environ=environ))
        yield AmbientWorld(mesh, gateway, process, cloudrun, old_port)


def _krun(mesh: Mesh, app: Address) -> dict[str, str]:
    return {
        "HBONE_INBOUND": "builtin",
        "HBONE_INBOUND_LISTEN": "127.0.0.1:0",
        "HBONE_CERTS": str(mesh.member(HELLO)),
        "HBONE_ALLOW": "ns/demo/sa/*",
        "HBONE_APP": str(app),
        "HBONE_APP_PROTOCOL": "tcp",
        "HBONE_INNER_PORTS": f"8080={app.port}",
        "WORKLOAD_NAME": "hello",
    }


def _cloudrun(folder: Path, container: Address) -> list[str]:
    return [
        *("-m", "hbone", "cloudrun", "--log-format", "json", "--dir", str(folder / "cloudrun")),
        *("--listen", "127.0.0.1:0", "--metadata", "127.0.0.1:0", "--container", str(container)),
        *("--audience", SERVICE_URL, "--concurrency", str(CONCURRENCY)),
    ]

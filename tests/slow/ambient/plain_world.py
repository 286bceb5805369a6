"""A gateway that speaks the mesh's mTLS for members whose bytes are plain: all of it as processes.

    member → HBONE → hgate → POST, in it mTLS of hgate's → the Cloud Run stand-in → krun → its mTLS end → app

Owned here: certificates, rules and routes. What clients and apps do is the tests'.
"""

from __future__ import annotations

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
SERVICE_URL = "https://hello-123456789012.us-central1.run.app"

WRONG_AUTHORITY = "wrong.demo.svc.cluster.local:8080"
"""The same service, where the route wants another one."""

DENIED_AUTHORITY = "denied.demo.svc.cluster.local:8080"
"""The same service, where hgate shows a certificate that krun does not let in."""

OLD_AUTHORITY = "old.demo.svc.cluster.local:8080"
OLD_NAME = "old-123456789012.us-central1.run.app"

HELLO = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "hello")
OUTSIDER = SpiffeId.of_workload(TRUST_DOMAIN, "other", "hgate")
STRANGER = SpiffeId.of_workload(TRUST_DOMAIN, "other", "stranger")
"""Whom hgate does not allow."""


@dataclass(frozen=True, slots=True)
class PlainWorld:
    """The running processes."""

    mesh: Mesh
    gateway: Hgate
    krun: Process
    old_port: int
    """Where the service of OLD_AUTHORITY is looked for; see `old_service`."""
    environ: dict[str, str]
    """Where hgate gets its tokens."""

    @property
    def hbone(self) -> Address:
        """hgate's HBONE port."""
        assert self.gateway.hbone is not None
        return self.gateway.hbone

    def ztunnel(self, identity: SpiffeId = CALLER) -> AbstractAsyncContextManager[Ztunnel]:
        """A ztunnel of this member; its outer CONNECTs are all that it needs."""
        return Ztunnel.of(self.hbone.port, self.mesh.tls(self.mesh.member(identity)))

    def old_service(self) -> AbstractAsyncContextManager[Service]:
        """The service of OLD_AUTHORITY, whose requests the test answers."""
        folder = self.mesh.folder_of(SpiffeId.of_workload(TRUST_DOMAIN, "run", "old"))
        certificates, key, _ = certificate_folder.find(folder).all
        return Service.listening(contexts.server_context(certificates, key), self.old_port)


@contextmanager
def running(folder: Path, app: Address, inbound: str) -> Iterator[PlainWorld]:
    """Runs it in `folder`, before an app that listens on `app`, with krun's mTLS end `inbound` (envoy,
    builtin), until the block ends; each process has to stop in order."""
    mesh = Mesh(folder)
    old = SpiffeId.of_workload(TRUST_DOMAIN, "run", "old")
    _, _, old_ca = certificate_folder.find(mesh.member(old, dns_names=[OLD_NAME])).all
    told = {
        "HBONE_INBOUND": inbound,
        "HBONE_INBOUND_LISTEN": "127.0.0.1:0",
        "HBONE_ENVOY_ADMIN": "127.0.0.1:0",
        "HBONE_CERTS": str(mesh.member(HELLO)),
        "HBONE_ALLOW": "ns/istio-system/sa/hgate",
        "HBONE_APP": str(app),
        "HBONE_APP_PROTOCOL": "tcp",
    }
    with ExitStack() as block:
        old_port = block.enter_context(reserved_port())
        process, container = block.enter_context(krun(folder, **told))
        arguments = [
            *("-m", "hbone", "cloudrun", "--log-format", "json", "--dir", str(folder / "cloudrun")),
            *("--listen", "127.0.0.1:0", "--metadata", "127.0.0.1:0", "--container", str(container)),
            *("--audience", SERVICE_URL, "--concurrency", str(CONCURRENCY)),
        ]
        cloudrun = Process("cloudrun", arguments, {}, folder)
        block.callback(cloudrun.stop)
        service = {
            "tunnel": f"{SERVICE_URL}/_hbone/15003",
            "connect": printed(cloudrun, "CLOUDRUN_ADDRESS"),
            "ca": printed(cloudrun, "CLOUDRUN_CA"),
            "token": {"audience": SERVICE_URL},
            "inner": "none",
            "peer": [str(HELLO)],
        }
        routes = [
            {"host": HOST, **service},
            {"host": _host(WRONG_AUTHORITY), **service, "peer": [str(CALLER)]},
            {"host": _host(DENIED_AUTHORITY), **service, "identity": str(mesh.member(OUTSIDER))},
            {
                **service,
                "host": _host(OLD_AUTHORITY),
                "tunnel": f"https://{OLD_NAME}/_hbone/15003",
                "connect": f"127.0.0.1:{old_port}",
                "ca": str(old_ca),
            },
        ]
        port = {
            "certificates": str(mesh.member(GATEWAY)),
            "rules": [{"from": [str(CALLER)], "to": ["*.demo.svc.cluster.local:8080"]}],
        }
        environ = {"GCE_METADATA_HOST": printed(cloudrun, "GCE_METADATA_HOST")}
        gateway = block.enter_context(hgate(folder, routes=routes, hbone=port, environ=environ))
        yield PlainWorld(mesh, gateway, process, old_port, environ)


def _host(authority: str) -> str:
    return authority.partition(":")[0]

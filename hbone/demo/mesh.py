"""The demo's mesh: a temporary CA, a service on the stand-in for Cloud Run, and the processes between
them."""

from __future__ import annotations

import shlex
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hbone.demo.processes import Process, Record
from shared.address import Address
from shared.credentials.certificates.authority import Authority
from shared.net.tls.certificate_folder import CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE
from shared.trust.spiffe import SpiffeId

TRUST_DOMAIN = "demo.local"
HOST = "hello.demo.svc.cluster.local"
SNI = f"outbound_.8080_._.{HOST}"
SERVICE_URL = "https://hello.a.run.app"

CLIENT_FILES = (CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE)
"""The client's certificate, its key, and the mesh's roots."""

_GATEWAY_FILE = """\
listen: ["127.0.0.1:0"]
admin: "127.0.0.1:0"
metrics: off
health: off
routes:
  - host: "*.demo.svc.cluster.local"
    tunnel: "https://{{service}}.a.run.app/_hbone/15003"
    connect: "{address}"
    ca: "{ca}"
    token: {{audience: "https://{{service}}.a.run.app"}}
"""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Everything that runs, from the client's side to the app's."""

    folder: Path
    gateway: Address
    admin: Address
    """hgate's admin port, with its page."""
    hgate: Process
    cloudrun: Process
    krun: Process
    inbound: str
    """What ends the mTLS: envoy or builtin."""
    running: ExitStack

    @property
    def client_files(self) -> Path:
        """Folder with the client's certificate, key and the mesh's roots."""
        return self.folder / "client"

    def stop(self) -> None:
        """Ends all processes, the client's side first; an interruption spares none of them."""
        self.running.close()


def start(folder: Path, inbound: str) -> Mesh:
    """Makes certificates in `folder` and starts krun, the front end and hgate on free ports of 127.0.0.1.

    `inbound` is auto, envoy or builtin. Raises UnavailableError if a process does not start, after ending the
    others.
    """
    _certificates(folder)
    with ExitStack() as running:
        krun = _krun(folder, inbound)
        running.callback(krun.stop)
        container = _word_after(krun, "tunnels on ")
        kind = _word_after(krun, "mTLS end: ").rstrip(",")
        cloudrun = _cloudrun(folder, container)
        running.callback(cloudrun.stop)
        hgate = _hgate(folder, cloudrun)
        running.callback(hgate.stop)
        gateway, admin = (Address.parse(_word_after(hgate, f"{word} on ")) for word in ("listening", "admin"))
        return Mesh(folder, gateway, admin, hgate, cloudrun, krun, kind, running.pop_all())


def _certificates(folder: Path) -> None:
    mesh = Authority.create(TRUST_DOMAIN)
    # The DNS names let curl check the host as browsers do; a sidecar checks only the SPIFFE ID.
    hello = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "hello")
    mesh.write(folder / "workload", mesh.issue(hello, dns_names=(SNI, HOST)))
    mesh.write(folder / "client", mesh.issue(SpiffeId.of_workload(TRUST_DOMAIN, "demo", "client")))


def _krun(folder: Path, inbound: str) -> Process:
    environ = {
        "XDS_ADDR": "-",
        "HBONE_LISTEN": "127.0.0.1:0",
        "HBONE_INBOUND": inbound,
        "HBONE_INBOUND_LISTEN": "127.0.0.1:0",
        "HBONE_ENVOY_ADMIN": "127.0.0.1:0",
        "HBONE_HEALTH": "-",
        "HBONE_METRICS": "-",
        "HBONE_ADMIN": "-",
        "HBONE_APP": f"127.0.0.1:{_free_port()}",
        "HBONE_CERTS": str(folder / "workload"),
        "HBONE_ALLOW": f"spiffe://{TRUST_DOMAIN}/ns/demo/sa/*",
        "HBONE_REQUEST_LOG": "all",
        "HBONE_LOG_FORMAT": "json",
    }
    return Process("krun", ["-m", "agent", sys.executable, "-m", "hbone.demo.app"], environ, folder)


def _cloudrun(folder: Path, container: str) -> Process:
    arguments = [
        *("-m", "hbone", "cloudrun", "--listen=127.0.0.1:0", "--metadata=127.0.0.1:0"),
        *(f"--container={container}", f"--audience={SERVICE_URL}"),
        *("--log-format=json", f"--dir={folder / 'cloudrun'}"),
    ]
    return Process("cloudrun", arguments, {}, folder)


def _hgate(folder: Path, cloudrun: Process) -> Process:
    config = folder / "hgate.yaml"
    address = _value_of(cloudrun, "CLOUDRUN_ADDRESS")
    config.write_text(_GATEWAY_FILE.format(address=address, ca=_value_of(cloudrun, "CLOUDRUN_CA")))
    arguments = ["-m", "gateway", "--config", str(config), "--log-format", "json"]
    environ = {"GCE_METADATA_HOST": _value_of(cloudrun, "GCE_METADATA_HOST")}
    return Process("hgate", arguments, environ, folder)


def _free_port() -> int:
    """A free port for the app, which krun has to know before the app listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _word_after(process: Process, beginning: str) -> str:
    """The word that follows `beginning` in the log."""
    record = process.wait_for(lambda record: str(record.get("message", "")).startswith(beginning))
    return str(record["message"]).removeprefix(beginning).split()[0]


def _value_of(process: Process, name: str) -> str:
    """The VALUE of a printed NAME=VALUE."""

    def wanted(record: Record) -> bool:
        return str(record.get("text", "")).startswith(f"{name}=")

    (line,) = shlex.split(process.wait_for(wanted)["text"])  # written for a shell's eval
    return line.partition("=")[2]

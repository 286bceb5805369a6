"""The whole path to a service that scales to zero: no krun and no app run until the first request asks."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hbone.demo.mesh import CLIENT_FILES, HOST, SERVICE_URL, SNI, TRUST_DOMAIN
from hbone.demo.processes import Process
from shared.address import Address
from shared.credentials.certificates.authority import Authority
from tests.support.world import CALLER, PATIENCE_S, WORKLOAD, find_program, free_port, printed, word_after

_KRUN = {
    "XDS_ADDR": "-",
    "HBONE_INBOUND": "builtin",
    "HBONE_HEALTH": "-",
    "HBONE_METRICS": "-",
    "HBONE_ADMIN": "-",
    "HBONE_ALLOW": f"spiffe://{TRUST_DOMAIN}/ns/demo/sa/*",
}

_GATEWAY_FILE = """\
listen: ["127.0.0.1:0"]
admin: off
metrics: off
health: off
limits: {{response_timeout: 200ms, max_retries: 0}}
routes:
- host: "*.demo.svc.cluster.local"
  tunnel: {url}/_hbone/15003
  connect: {front_end}
  ca: {ca}
  cold_start: {patience}
"""


@contextmanager
def asleep(folder: Path, patience: str) -> Iterator[tuple[Address, Process, Process]]:
    """hgate, its process and the front end's, before a container that is started by the first request; the
    start ends once there is a file `go` in `folder`."""
    mesh = Authority.create(TRUST_DOMAIN)
    mesh.write(folder / "workload", mesh.issue(WORKLOAD, dns_names=(SNI, HOST)))
    mesh.write(folder / "caller", mesh.issue(CALLER))
    container = f"127.0.0.1:{free_port()}"
    own = {
        "HBONE_LISTEN": container,
        "HBONE_INBOUND_LISTEN": f"127.0.0.1:{free_port()}",
        "HBONE_APP": f"127.0.0.1:{free_port()}",
        "HBONE_CERTS": str(folder / "workload"),
    }
    krun = shlex.join([sys.executable, "-m", "agent", sys.executable, "-m", "hbone.demo.app"])
    wait = f"until [ -e {folder / 'go'} ]; do sleep 0.02; done; exec {krun}"
    flags = ["--start", shlex.join(["sh", "-c", wait]), "--start-wait", "0.5"]
    with ExitStack() as block:
        cloudrun = Process(
            "cloudrun",
            [
                *("-m", "hbone", "cloudrun", "--listen=127.0.0.1:0", "--metadata=127.0.0.1:0"),
                *(f"--container={container}", f"--audience={SERVICE_URL}", "--log-format=json", *flags),
                f"--dir={folder / 'cloudrun'}",
            ],
            _KRUN | own,
            folder,
        )
        block.callback(cloudrun.stop)
        file = folder / "hgate.yaml"
        front_end, ca, metadata = (
            printed(cloudrun, name) for name in ("CLOUDRUN_ADDRESS", "CLOUDRUN_CA", "GCE_METADATA_HOST")
        )
        file.write_text(_GATEWAY_FILE.format(url=SERVICE_URL, front_end=front_end, ca=ca, patience=patience))
        arguments = ["-m", "gateway", "--config", str(file), "--log-format", "json"]
        hgate = Process("hgate", arguments, {"GCE_METADATA_HOST": metadata}, folder)
        block.callback(hgate.stop)
        yield Address.parse(word_after(hgate, "listening on ")), hgate, cloudrun


def curl(folder: Path, gateway: Address) -> subprocess.Popen[bytes]:
    certificates, key, roots = (folder / "caller" / file for file in CLIENT_FILES)
    command = [
        *(find_program("curl"), "--silent", "--show-error", "--fail", "--max-time", str(PATIENCE_S)),
        *("--cacert", roots, "--cert", certificates, "--key", key),
        *("--resolve", f"{SNI}:{gateway.port}:{gateway.host}", f"https://{SNI}:{gateway.port}/hello"),
    ]
    return subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def tunnel_line(hgate: Process) -> dict[str, object]:
    return hgate.wait_for(lambda record: "flags" in record, PATIENCE_S)


def test_the_first_client_waits_and_is_served(tmp_path: Path) -> None:
    with asleep(tmp_path, "60s") as (gateway, hgate, cloudrun):
        client = curl(tmp_path, gateway)
        cloudrun.wait_for(lambda record: record.get("status") == 429, PATIENCE_S)
        (tmp_path / "go").touch()
        out, error = client.communicate(timeout=PATIENCE_S)
        assert client.returncode == 0, error
        assert b"hello" in out.lower()
        line = tunnel_line(hgate)
        assert line["status"] == 200
        assert isinstance(line["attempts"], int)
        assert line["attempts"] > 1
        second = curl(tmp_path, gateway)
        second.communicate(timeout=PATIENCE_S)
        assert second.returncode == 0, "and it runs from then on"


@pytest.mark.parametrize("patience", ["0", "1s"])
def test_without_enough_patience_it_is_refused(tmp_path: Path, patience: str) -> None:
    with asleep(tmp_path, patience) as (gateway, hgate, _):
        client = curl(tmp_path, gateway)
        client.communicate(timeout=PATIENCE_S)
        assert client.returncode == 35, "the TLS handshake ends with an alert"
        assert tunnel_line(hgate)["flags"] in ("UPSTREAM", "STATUS")

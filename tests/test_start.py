"""What a command imports before it does its work: ssh's users and cold starts wait for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.metadata_server import closed_port

NOBODY_NEEDS = frozenset(
    # Certificates and tokens of our own making, the answers of admin ports, and what only mistakes need.
    ("OpenSSL", "cryptography", "jwt", "difflib", "email", "http.client", "importlib.metadata", "bz2", "lzma")
)

NO_TUNNELS_NEED = NOBODY_NEEDS | {
    *("h11", "yaml", "prometheus_client", "datetime", "shared.net.tls.mesh_tls"),
    *("shared.net.names.resolver", "pycares"),  # where no name is dialled
}


def imported(*command: str, environ: Mapping[str, str] | None = None) -> set[str]:
    """The modules that `python -m command` imports."""
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *command],
        env={**os.environ, **(environ or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    names = re.findall(r"^import time:.*\| +(\S+)$", ran.stderr, re.MULTILINE)
    return set(names[names.index("site") + 1 :])  # what comes before is the interpreter's


def test_hbone_imports_what_a_tunnel_needs() -> None:
    names = imported("hbone", f"http://127.0.0.1:{closed_port()}/_hbone/22")

    assert "shared.net.dial" in names
    assert not names & (NO_TUNNELS_NEED | {"shared.net.http1", "shared.trust.spiffe"})


def test_localhost_needs_no_resolver() -> None:
    names = imported("hbone", f"http://localhost:{closed_port()}/_hbone/22")

    assert "shared.net.names.resolver" in names
    assert "pycares" not in names


def test_krun_imports_what_a_tunnel_needs() -> None:
    told = {
        "XDS_ADDR": "-",
        "HBONE_INBOUND": "none",
        "HBONE_LISTEN": "127.0.0.1:0",
        "HBONE_APP": f"127.0.0.1:{closed_port()}",
    }
    names = imported("agent", "true", environ=told)

    assert "agent.launch.launcher" in names
    assert not [name for name in names if name.startswith(("agent.mounts", "agent.config.references"))]
    assert not names & (
        NO_TUNNELS_NEED
        | {"agent.mtls.envoy", "agent.mtls.inbound", "agent.tunnels.reverse", "tempfile", "argparse"}
    )


@pytest.mark.parametrize("cluster", ["", "cluster: {allow: []}"])
def test_hgate_loads_nothing_of_the_cluster_s_client(tmp_path: Path, cluster: str) -> None:
    """That is for the process at the API server, hgate cluster."""
    file = tmp_path / "hgate.yaml"
    file.write_text(f"routes: []\n{cluster}\n")
    ran = imported("gateway", "explain", "--config", str(file), "--sni", "hello.example")
    assert not {name.partition(".")[0] for name in ran} & {"kubernetes", "aiohttp"}
    of_app = imported("gateway.app")
    assert not {name.partition(".")[0] for name in of_app} & {"kubernetes", "aiohttp"}
    assert "gateway.cluster.cluster_app" not in of_app


def test_hgate_checks_a_file_without_serving(tmp_path: Path) -> None:
    file = tmp_path / "hgate.yaml"
    file.write_text("listen: ['127.0.0.1:0']\nroutes: [{host: '*.example', forward: '127.0.0.1:1'}]\n")
    names = imported("gateway", "check", "--config", str(file))

    assert "gateway.config.config" in names
    assert not names & (NOBODY_NEEDS - {"bz2", "lzma"})
    assert not names & {"gateway.app", "h11", "prometheus_client", "uvloop"}


@pytest.mark.parametrize("package", ["gateway", "agent", "hbone"])
def test_the_collector_waits_until_all_is_imported(package: str) -> None:
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import gc, {package}.cli as cli; cli.run = lambda *_: gc.isenabled();"
            f"from {package}.__main__ import main; main()",
        ],
        timeout=60,
    )

    assert ran.returncode == 0

"""hgate as the pod of deploy/k8s runs it: with an overlay's file, in a network of its own, on a file system
that it cannot write, without a capability."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import yaml

from shared.net.http1 import get
from tests.support.network_namespace import NoNetworkError, network
from tests.support.process import started
from tests.support.tcp_peer import PATIENCE_S

K8S = Path(__file__).parents[2] / "deploy" / "k8s"

CONFINED = (
    *("unshare", "--mount", "bash", "-c"),
    # Each mount by itself: `remount` knows no tree. What cannot be remounted (/proc) stays as it is.
    "awk '{print $5}' /proc/self/mountinfo |\n"
    'while read -r place; do mount -o remount,ro,bind "$place" 2>/dev/null; done\n'
    'if touch "$0" 2>/dev/null; then echo "still writable: $0" >&2; exit 1; fi\n'
    # Root without capabilities is a user who owns much: the checkout may be in root's home.
    'exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"',
)


@pytest.mark.parametrize("overlay", ["gke", "plain"])
async def test_it_serves_as_its_manifest_says(overlay: str, tmp_path: Path) -> None:
    pod = yaml.safe_load((K8S / "base" / "deployment.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    declared = {port["name"]: port["containerPort"] for port in container["ports"]}
    command, *flags = container["args"]
    file = K8S / "overlays" / overlay / "hgate.yaml"
    arguments = [command, *(str(file) if flag.startswith("/") else flag for flag in flags)]
    try:
        with network(tmp_path):
            async with started("gateway", *arguments, before=(*CONFINED, str(tmp_path / "written"))) as hgate:
                await hgate.said("^ready$")
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    asked = container[probe]["httpGet"]
                    url = f"http://127.0.0.1:{declared[asked['port']]}{asked['path']}"
                    answer = await get(url, headers={}, timeout_s=PATIENCE_S, max_bytes=65536)
                    assert answer.status == 200, url
                for port in declared.values():
                    socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
    except NoNetworkError as error:
        pytest.skip(str(error))

"""`make mesh`, or `python -m tests.mesh.run [PYTEST ARGUMENTS]`: tests/mesh, in a mesh of its own.

Takes root, network namespaces, Go 1.26 and etcd (Debian: etcd-server). Cold it takes twenty minutes, most of
them Go's; warm three. The exit code is pytest's, or 69 where it cannot run, with the reason.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.kube.build import unavailable
from tests.mesh import build, places
from tests.mesh.places import BRIDGE, PLACES, namespace
from tests.needs import cache

ROOT = Path(__file__).parent.parent.parent

NAMES = ("istiod.istio-system.svc", "hello.a.run.app")
"""What is at the control plane's address, in a hosts file of the run's own."""

RUNNING = "HBONE_TEST_MESH"
"""The variable that tells the tests that they are in the mesh, and where its files are."""


def main() -> int:
    if os.geteuid() != 0:
        unavailable("make mesh makes network namespaces, which takes root")
    if shutil.which("etcd") is None:
        unavailable("no etcd on PATH (Debian: etcd-server)")
    return in_the_mesh("pytest", *(sys.argv[1:] or ["tests/mesh"]))


def in_the_mesh(module: str, *arguments: str) -> int:
    """Runs a module in the control plane's namespace, with a folder for the mesh's files; returns its exit
    code. Signals are the module's to follow. Ends the process where there can be no namespaces."""
    build.built()
    with tempfile.TemporaryDirectory(prefix="mesh-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # pilot-agent is another user
        hosts = folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{PLACES[BRIDGE]} {' '.join(NAMES)}\n")
        try:
            with places.laid_out():
                # Over the machine's, in the mount namespace of pytest, which all that it starts inherits.
                bound = 'mount --bind "$0" /etc/hosts && exec "$@"'
                tests = [sys.executable, "-m", module, *arguments]
                # Tests have a home of their own.
                environ = {**os.environ, RUNNING: name, "HBONE_TEST_CACHE": str(cache())}
                within = ["ip", "netns", "exec", namespace(BRIDGE), "bash", "-c", bound, str(hosts), *tests]
                return _run(within, environ)
        except subprocess.CalledProcessError as error:
            unavailable(f"no network namespaces here: {' '.join(error.cmd)}: {error.stderr.strip()}")


def _run(command: list[str], environ: Mapping[str, str]) -> int:
    with subprocess.Popen(command, cwd=ROOT, env=environ) as running:
        signal.signal(signal.SIGINT, lambda *_: None)  # a terminal's is for both
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: running.send_signal(number))
        return running.wait()


if __name__ == "__main__":
    sys.exit(main())

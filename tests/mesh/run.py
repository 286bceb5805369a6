"""`make mesh`, or `python -m tests.mesh.run [PYTEST ARGUMENTS]`: tests/mesh, in a mesh of their own.

Without arguments there are two meshes, each with one half of the files: most of the time is pilot-agent's,
which looks every two seconds whether Envoy is ready.

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
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.errors import EXIT_UNAVAILABLE
from tests.kube.build import unavailable
from tests.mesh import build, places
from tests.mesh.places import BRIDGE, PLACES, namespace
from tests.mesh.workloads import AMBIENT, BEHIND
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
    if len(sys.argv) > 1:
        return in_the_mesh("pytest", *sys.argv[1:])
    build.built()
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    return _both_halves([str(file.relative_to(ROOT)) for file in files])


def _both_halves(files: Sequence[str]) -> int:
    """Runs both at once, and prints what the second one has said when both have ended. A failure of either
    counts before the 69 of the other."""
    first, second = ([sys.executable, "-m", "tests.mesh.run", *half] for half in (files[::2], files[1::2]))
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(first, cwd=ROOT) as one,
        subprocess.Popen(second, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT) as other,
    ):
        _pass_signals_to(one, other)
        codes = one.wait(), other.wait()
        said.seek(0)
        shutil.copyfileobj(said, sys.stdout.buffer)
        return next((code for code in codes if code not in (0, EXIT_UNAVAILABLE)), max(codes))


def in_the_mesh(module: str, *arguments: str) -> int:
    """Runs a module in the control plane's namespace, with a folder for the mesh's files; returns its exit
    code. Signals are the module's to follow. Ends the process where there can be no namespaces."""
    build.built()
    with tempfile.TemporaryDirectory(prefix="mesh-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # pilot-agent is another user
        hosts = folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{PLACES[BRIDGE]} {' '.join(NAMES)}\n{AMBIENT} {BEHIND}\n")
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
        _pass_signals_to(running)
        return running.wait()


def _pass_signals_to(*running: subprocess.Popen[bytes]) -> None:
    def passed(number: int, _: object) -> None:
        for process in running:
            process.send_signal(number)

    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal's is for all
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, passed)


if __name__ == "__main__":
    sys.exit(main())

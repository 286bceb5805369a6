"""No core, and nobody of the same user who looks in: asked of the real commands, and of the kernel."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from shared.core_dumps import VARIABLE
from tests.support.metadata_server import closed_port

PATIENCE_S = 30

AS_A_USER = ["setpriv", "--bounding-set=-all"] if os.geteuid() == 0 else []
"""Root without capabilities is a user like any other: it owns its processes and may not look into others'."""

HGATE = """
listen: ["127.0.0.1:0"]
admin: "127.0.0.1:0"
metrics: "127.0.0.1:0"
health: "127.0.0.1:0"
routes: []
"""


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that says nothing, so that who asks it waits."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.fixture(params=["krun", "hgate", "hgate with workers", "hbone"])
def command(request: pytest.FixtureRequest, tmp_path: Path, silent: int) -> list[str]:
    """One of our commands, to be run until it is killed."""
    file = tmp_path / "hgate.yaml"
    file.write_text(HGATE)
    return {
        "krun": ["agent"],
        "hgate": ["gateway", "--config", str(file)],
        "hgate with workers": ["gateway", "--config", str(file), "--workers", "2"],
        "hbone": ["hbone", "--no-token", f"http://127.0.0.1:{silent}/_hbone/22"],
    }[request.param]


@contextmanager
def running(command: list[str], folder: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command of ours, once it has done what it does before anything else."""
    settings = {
        "HBONE_LISTEN": f"127.0.0.1:{closed_port()}",
        "HBONE_INBOUND": "none",
        "HBONE_DRAIN_TIMEOUT": "0",
        "A_SECRET": "of-the-environment",
    }

    def no_limit() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))

    process = subprocess.Popen(
        [*AS_A_USER, sys.executable, "-m", *command],
        env={**os.environ, **settings, **variables},
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=no_limit,
        process_group=0,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)
        assert process.stdin is not None
        process.stdin.close()


def until_it_serves(pid: int) -> None:
    """Waits until the process has imported its event loop: the first of what all commands do."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if "uvloop" in Path(f"/proc/{pid}/maps").read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"{pid} has not begun")


def seen_by_a_user(path: str) -> bool:
    """Whether another process of the same user may read `path`."""
    return subprocess.run([*AS_A_USER, "cat", path], capture_output=True).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees when it has begun")
def test_another_program_of_the_user_sees_nothing_of_it(command: list[str], tmp_path: Path) -> None:
    with running(command, tmp_path) as process:
        until_it_serves(process.pid)
        assert not seen_by_a_user(f"/proc/{process.pid}/environ")
        assert not seen_by_a_user(f"/proc/{process.pid}/maps")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees when it has begun")
def test_who_debugs_it_may_ask_for_the_old_way(command: list[str], tmp_path: Path) -> None:
    with running(command, tmp_path, **{VARIABLE: "1"}) as process:
        until_it_serves(process.pid)
        assert seen_by_a_user(f"/proc/{process.pid}/environ")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees when it has begun")
@pytest.mark.parametrize("kept", ["", "1"])
def test_a_crash_leaves_no_core(command: list[str], kept: str, tmp_path: Path) -> None:
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("no process may leave a core here")
    with running(command, tmp_path, **{VARIABLE: kept}) as process:
        until_it_serves(process.pid)
        os.kill(process.pid, signal.SIGSEGV)
        _, status = os.waitpid(process.pid, 0)
        process.returncode = 0  # it has been waited for
        assert os.WTERMSIG(status) == signal.SIGSEGV
        assert os.WCOREDUMP(status) == (kept == "1")


@pytest.mark.skipif("COVERAGE_RUN" in os.environ, reason="another user may not write what is covered")
@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed")
def test_what_we_need_of_our_own_proc_stays_open() -> None:
    """A client certificate is loaded, and standard error opened anew, by way of /proc/self/fd."""
    script = """
import os
from shared import core_dumps
file = os.memfd_create("certificate")
os.write(file, b"certificate")
os.fchown(file, 65534, 65534)
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
read, write = os.pipe()
core_dumps.forbid(os.environ)
print(open(f"/proc/self/fd/{file}").read())
os.close(os.open(f"/proc/self/fd/{write}", os.O_WRONLY | os.O_NONBLOCK))
print(len(open("/proc/net/tcp").readlines()) > 0, len(os.listdir("/proc/self/fd")) > 3)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout.split(), done.stderr) == (["certificate", "True", "True"], "")

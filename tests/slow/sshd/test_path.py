"""The whole path: OpenSSH, `hbone`, the front end, krun with the app that it has started, and krun's sshd."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.config.ssh_settings import SshServer
from hbone.demo.mesh import SERVICE_URL
from tests.path.programs import MUCH_BYTES, random_file, run, sha256
from tests.slow.sshd.test_commands import is_running
from tests.support.ssh_clients import USER, new_key
from tests.support.world import PATIENCE_S, World, find_program, free_port, running, said

APP = """
import os, socket
server = socket.create_server(("127.0.0.1", int(os.environ["PORT"])))
while True:
    server.accept()[0].close()
"""


@pytest.fixture
def world(kind: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    new_key(tmp_path, "user_key")
    (tmp_path / "home").mkdir()
    environ = {
        "SSH_AUTH": (tmp_path / "user_key.pub").read_text(),
        "HBONE_SSH": kind,
        "HBONE_SSH_LISTEN": f"127.0.0.1:{free_port()}",
        "HBONE_SSH_USER": USER,
        "HBONE_APP": f"127.0.0.1:{free_port()}",
        "HBONE_DRAIN_TIMEOUT": "0.1",
        "HOME": str(tmp_path / "home"),
        "A_SECRET": "for the app",
    }
    with running(tmp_path, inbound="none", app=[sys.executable, "-c", APP], environ=environ) as world:
        monkeypatch.setenv("GCE_METADATA_HOST", world.metadata)
        yield world


def options(world: World) -> list[str]:
    hbone = Path(sys.executable).with_name("hbone")
    way = [hbone, "--ca", world.front_end_ca, "--connect", world.front_end, f"{SERVICE_URL}/_hbone/22"]
    told = {
        "ProxyCommand": shlex.join(map(str, way)),
        "User": USER,
        "IdentityFile": world.folder / "user_key",
        "IdentitiesOnly": "yes",
        "BatchMode": "yes",
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",
    }
    return ["-F", "none", *(word for name, value in told.items() for word in ("-o", f"{name}={value}"))]


def test_a_command_with_the_apps_environment(world: World) -> None:
    done = run(find_program("ssh"), *options(world), "hello", "env; exit 7")
    assert done.returncode == 7, done.stderr
    told = done.stdout.decode()
    assert "A_SECRET=for the app\n" in told
    assert "\nPORT=" in f"\n{told}"
    assert "HBONE_SSH" not in told
    ends = world.krun.wait_for(lambda record: " ends: " in said(record), PATIENCE_S)
    assert " for " in said(ends)  # whom the front end speaks for


def test_scp_64_mib_both_ways(world: World) -> None:
    body = random_file(world.folder / "body", MUCH_BYTES)
    there, back = world.folder / "there", world.folder / "back"
    scp = (find_program("scp"), "-q", *options(world))
    assert run(*scp, body, f"hello:{there}").stderr == b""
    assert run(*scp, f"hello:{there}", back).stderr == b""
    assert sha256(body) == sha256(there) == sha256(back)


def test_krun_that_stops_takes_sessions_along(world: World) -> None:
    command = [find_program("ssh"), *options(world), "hello", "trap '' HUP; echo $$; sleep 1000; sleep 1000"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        pid = int(process.stdout.readline())
        assert is_running(pid)
        world.krun.stop()
        assert process.wait(PATIENCE_S) == 255
        assert b"the container is stopping" in process.stderr.read()
    assert not is_running(pid)


def test_a_hop_that_is_killed(world: World) -> None:
    command = [find_program("ssh"), *options(world), "hello", "echo $$; sleep 1000; sleep 1000"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)

"""Real OpenSSH with `hbone` as its ProxyCommand, through the stand-in to a real sshd as `/_hbone/22`."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hbone.demo.mesh import SERVICE_URL
from shared.net.address import Address
from tests.path.app import GREETING, App, echo, greet_and_answer, read
from tests.path.programs import MUCH_BYTES, random_file, run, sha256, start
from tests.support.world import PATIENCE_S, World, find_program, free_port, running, said

CONNECTION_FAILED = 255
"""ssh(1), "EXIT STATUS"."""

_SSHD = """\
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
Subsystem sftp internal-sftp
"""

_SSH = """\
Host *
  User {user}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  HostKeyAlias container
  BatchMode yes
Host hello
  ProxyCommand {hbone} --ca {ca} --connect {front_end} {url}/_hbone/22
Host wrong-target
  ProxyCommand {hbone} --ca {ca} --connect {front_end} {url}/_hbone/2222
Host wrong-audience
  ProxyCommand {hbone} --audience https://other.a.run.app --ca {ca} --connect {front_end} {url}/_hbone/22
Host wrong-address
  ProxyCommand {hbone} --ca {ca} --connect {nobody} {url}/_hbone/22
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all that OpenSSH reads is."""
    return tmp_path_factory.mktemp("ssh")


@pytest.fixture(scope="module")
def sshd(folder: Path) -> Iterator[Address]:
    for key in ("host_key", "user_key"):
        keygen = run(find_program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", folder / key)
        assert keygen.returncode == 0, keygen.stderr
    address = Address("127.0.0.1", free_port())
    config = folder / "sshd_config"
    config.write_text(_SSHD.format(address=address, folder=folder))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # as Debian's ssh.service does; sshd locks itself in there
    process = start("sshd", [find_program("sshd"), "-D", "-e", "-f", config], folder)
    try:
        process.wait_for(lambda record: said(record).startswith("Server listening on"), PATIENCE_S)
        yield address
    finally:
        process.stop()


@pytest.fixture(scope="module")
def world(folder: Path, sshd: Address) -> Iterator[World]:
    with (
        App(echo) as app,
        running(folder, inbound="none", app=app.address, environ={"HBONE_SSHD": str(sshd)}) as world,
    ):
        yield world


@pytest.fixture(scope="module")
def config(folder: Path, world: World) -> Path:
    """The user's ssh_config."""
    host_key = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"container {host_key}")
    file = folder / "ssh_config"
    file.write_text(
        _SSH.format(
            user=getpass.getuser(),
            folder=folder,
            hbone=Path(sys.executable).with_name("hbone"),
            ca=world.front_end_ca,
            front_end=world.front_end,
            url=SERVICE_URL,
            nobody=Address("127.0.0.1", free_port()),
        )
    )
    return file


@pytest.fixture(autouse=True)
def token_source(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", world.metadata)


def ssh(config: Path, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return run(find_program("ssh"), "-F", config, *arguments, stdin=stdin)


def test_a_commands_output_and_exit_status(config: Path) -> None:
    done = ssh(config, "hello", "cat; echo to standard error >&2; exit 7", stdin=b"from standard input")
    assert (done.returncode, done.stdout, done.stderr) == (
        7,
        b"from standard input",
        b"to standard error\n",
    )


def test_scp_64_mib_both_ways(config: Path, tmp_path: Path) -> None:
    body, there, back = random_file(tmp_path / "body", MUCH_BYTES), tmp_path / "there", tmp_path / "back"
    scp = (find_program("scp"), "-q", "-F", config)
    assert run(*scp, body, f"hello:{there}").stderr == b""
    assert sha256(there) == sha256(body)
    assert run(*scp, f"hello:{there}", back).stderr == b""
    assert sha256(back) == sha256(body)


def test_a_forwarded_port(config: Path, tmp_path: Path) -> None:
    port = free_port()
    with App(greet_and_answer) as app:
        forward = ["-N", "-v", "-L", f"127.0.0.1:{port}:{app.address}", "-o", "ExitOnForwardFailure=yes"]
        process = start("ssh", [find_program("ssh"), "-F", config, *forward, "hello"], tmp_path)
        try:
            # Not its word that it listens: that comes when it has yet to bind.
            process.wait_for(lambda record: "Entering interactive session" in said(record), PATIENCE_S)
            with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client:
                client.sendall(b"through ssh\n")
                assert read(client) == GREETING + b"through ssh\n"
        finally:
            process.stop()


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("wrong-target", "404"),
        ("wrong-audience", "401"),
        ("wrong-address", "connection refused"),
    ],
)
def test_a_failure_is_one_line_before_sshs_own(config: Path, host: str, reason: str) -> None:
    done = ssh(config, host, "true")
    assert done.returncode == CONNECTION_FAILED
    assert done.stdout == b""
    ours, *sshs = done.stderr.decode().splitlines()
    assert ours.startswith("hbone: ")
    assert reason in ours
    assert sshs[-1] == "Connection closed by UNKNOWN port 65535"
    assert not [line for line in sshs if line.startswith("hbone")]

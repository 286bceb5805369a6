"""Real OpenSSH with `hbone` as its ProxyCommand, through the stand-in to a real sshd as `/_hbone/22`."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hbone.demo.mesh import SERVICE_URL
from hbone.demo.processes import Process
from shared.address import Address
from tests.path.app import GREETING, App, echo, greet_and_answer, read
from tests.path.programs import MUCH_BYTES, random_file, run, sha256, start, through_hgate
from tests.path.sshd import Sshd, lets_us_in, new_key, openssh
from tests.support.cut_line import CutLine, line_to
from tests.support.forwards import started
from tests.support.world import PATIENCE_S, World, find_program, free_port, printed, running, said

HBONE = Path(sys.executable).with_name("hbone")

CONNECTION_FAILED = 255
"""ssh(1), "EXIT STATUS"."""

_SSH = """\
Host *
  User {user}
  IdentityFile {user_key}
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  HostKeyAlias container
  BatchMode yes
Host hello
  ProxyCommand {hbone} --ca {ca} --connect {front_end} {url}/_hbone/22
Host over-the-line
  ProxyCommand {hbone} --keepalive 1 --ca {ca} --connect {line} {url}/_hbone/22
Host wrong-target
  ProxyCommand {hbone} --ca {ca} --connect {front_end} {url}/_hbone/2222
Host wrong-audience
  ProxyCommand {hbone} --audience https://other.a.run.app --ca {ca} --connect {front_end} {url}/_hbone/22
Host wrong-address
  ProxyCommand {hbone} --ca {ca} --connect {nobody} {url}/_hbone/22
"""

pytestmark = lets_us_in


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all that OpenSSH reads is."""
    return tmp_path_factory.mktemp("ssh")


@pytest.fixture(scope="module")
def sshd(folder: Path) -> Iterator[Sshd]:
    with openssh(folder) as sshd:
        yield sshd


@pytest.fixture(scope="module")
def world(folder: Path, sshd: Sshd) -> Iterator[World]:
    with running(folder, inbound="builtin", app=sshd.address, environ=sshd.environ) as world:
        yield world


@pytest.fixture(scope="module")
def line(world: World) -> Iterator[CutLine]:
    """The way to the stand-in, which one test cuts."""
    with line_to(world.front_end) as line:
        yield line


@pytest.fixture(scope="module")
def config(folder: Path, sshd: Sshd, world: World, line: CutLine) -> Path:
    """The user's ssh_config."""
    (folder / "known_hosts").write_text(sshd.known_as("container"))
    file = folder / "ssh_config"
    file.write_text(
        _SSH.format(
            user=sshd.user,
            user_key=sshd.user_key,
            folder=folder,
            hbone=HBONE,
            ca=world.front_end_ca,
            front_end=world.front_end,
            url=SERVICE_URL,
            line=line.address,
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


def test_through_hgate_with_the_sshd_as_the_service_s_app(config: Path, world: World) -> None:
    """By a client of the mesh. Everything else by this way is in `tests.slow.ssh`."""
    done = ssh(config, *proxied(*through_hgate(world)), "hello", "cat; exit 7", stdin=b"from standard input")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"from standard input", b"")


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


def test_a_session_by_way_of_hbone_forward(config: Path, world: World, tmp_path: Path) -> None:
    body = random_file(tmp_path / "body", 8 << 20)
    way = [SERVICE_URL, "--ca", world.front_end_ca, "--connect", world.front_end, "-L", "0:22"]
    with started(tmp_path, *way) as forward:
        there = [
            "-o",
            "HostName=127.0.0.1",
            "-o",
            f"Port={forward.port()}",
            "-o",
            "ProxyCommand=none",
            "hello",
        ]
        done = ssh(config, *there, "sha256sum; exit 7", stdin=body.read_bytes())
    assert (done.returncode, done.stdout.split()[0].decode(), done.stderr) == (7, sha256(body), b"")


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


# hbone ssh, and hbone ssh-config.


@pytest.fixture
def hbone_ssh(world: World, sshd: Sshd, tmp_path: Path) -> list[str | Path]:
    """`hbone ssh` with its flags, and those of ssh that keep it from our own user's files; then comes
    SERVICE."""
    return [
        *(HBONE, "ssh", "--ca", world.front_end_ca, "--connect", str(world.front_end)),
        *("-F", "none", "-i", sshd.user_key, "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes"),
        *("-o", f"UserKnownHostsFile={tmp_path}/known_hosts", "-l", sshd.user),
    ]


URL = f"{SERVICE_URL}/_hbone/22"


def test_hbone_ssh(hbone_ssh: list[str | Path]) -> None:
    first = run(*hbone_ssh, URL, "cat; echo to standard error >&2; exit 7", stdin=b"from standard input")
    assert (first.returncode, first.stdout) == (7, b"from standard input")
    assert first.stderr.splitlines() == [
        b"Warning: Permanently added 'hello.a.run.app' (ED25519) to the list of known hosts.",
        b"to standard error",
    ]
    second = run(*hbone_ssh, URL, "--", "echo", "-n", "$((6 * 7))")
    assert (second.returncode, second.stdout, second.stderr) == (0, b"42", b"")


def test_an_instance_with_another_host_key(hbone_ssh: list[str | Path], sshd: Sshd, tmp_path: Path) -> None:
    other = new_key(tmp_path / "other").with_suffix(".pub").read_text()
    (tmp_path / "known_hosts").write_text(f"hello.a.run.app {other}")
    refused = run(*hbone_ssh, URL, "true")
    assert refused.returncode == CONNECTION_FAILED
    ours, *sshs = refused.stderr.decode().splitlines()
    assert ours.startswith(
        "hbone: hello.a.run.app has shown another host key before. A connection reaches any "
    )
    assert ours.endswith(" or use --any-host-key (TLS has proved the service)")
    assert sshs[-1] == "Host key verification failed."
    assert not [line for line in sshs if line.startswith("hbone")]

    hbone, ssh, *flags = hbone_ssh
    known = flags.index(f"UserKnownHostsFile={tmp_path}/known_hosts")
    accepted = run(hbone, ssh, "--any-host-key", *flags[: known - 1], *flags[known + 1 :], URL, "true")
    assert (accepted.returncode, accepted.stderr) == (0, b"")


def test_scp_by_what_ssh_config_prints(world: World, sshd: Sshd, tmp_path: Path) -> None:
    config, body, there = tmp_path / "config", random_file(tmp_path / "body", 1 << 20), tmp_path / "there"
    way = ("--ca", world.front_end_ca, "--connect", str(world.front_end))
    printed = run(HBONE, "ssh-config", *way, f"{sshd.user}@{URL}")
    assert (printed.returncode, printed.stderr) == (0, b"")
    settings = (
        f"  IdentityFile {sshd.user_key}\n  UserKnownHostsFile {tmp_path}/known_hosts\n  BatchMode yes\n"
    )
    config.write_text(printed.stdout.decode() + settings)
    copied = run(find_program("scp"), "-q", "-F", config, body, f"hello:{there}")
    assert copied.returncode == 0, copied.stderr
    assert sha256(there) == sha256(body)


# How a session ends.


@contextmanager
def session(config: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """An ssh whose command at the far side is there and waits for its input."""
    command = [find_program("ssh"), "-F", str(config), *arguments, "echo ready; cat"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def last_words(process: subprocess.Popen[str]) -> str:
    """hbone's line, once ssh has ended for it; no input and no end of it says so."""
    assert process.stderr is not None
    assert process.wait(PATIENCE_S) == CONNECTION_FAILED
    (line,) = [line for line in process.stderr.read().splitlines() if line.startswith("hbone: ")]
    return line


def proxied(*command: object) -> list[str]:
    """ssh's arguments for a ProxyCommand of its own."""
    return ["-o", f"ProxyCommand={shlex.join(map(str, command))}"]


def test_a_silent_session_goes_on(config: Path) -> None:
    """For several times as long as hbone waits for a sign of life."""
    done = ssh(config, "over-the-line", "sleep 3.5; echo still here")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"still here\n", b"")


def test_a_session_whose_line_drops_ends(config: Path, line: CutLine) -> None:
    with session(config, "over-the-line") as process:
        line.cut()
        told = last_words(process)
    assert re.fullmatch(
        rf"hbone: {SERVICE_URL}/_hbone/22: ended after [0-9.]+ s: "
        r"no answer from hello\.a\.run\.app for 2 s; is the line down\?",
        told,
    )


@pytest.mark.parametrize("way", ["straight", "through the front end"])
def test_a_session_whose_container_stops(
    config: Path, sshd: Sshd, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {**sshd.environ, "HBONE_DRAIN_TIMEOUT": "0.1"}
    with (
        App(echo) as app,
        running(tmp_path, inbound="none", app=app.address, environ=environ) as world,
    ):
        arguments: list[object] = []
        if way == "straight":
            url = f"http://{world.container}/_hbone/22"
            cause = "the container is stopping (GOAWAY with NO_ERROR, then "
        else:
            url = f"{SERVICE_URL}/_hbone/22"
            arguments += ["--ca", world.front_end_ca, "--connect", world.front_end]
            monkeypatch.setenv("GCE_METADATA_HOST", world.metadata)
            cause = "the target in the container broke off, or the container is stopping? "
        with session(config, *proxied(HBONE, *arguments, url), "hello") as process:
            world.krun.stop()
            told = last_words(process)
    assert told.startswith(f"hbone: {url}: ended after ")
    assert f" s: {cause}" in told


def test_a_session_that_lasts_as_long_as_a_request_may(config: Path, world: World, tmp_path: Path) -> None:
    """With a request timeout of 2 s, and a command that takes that for a customary one."""
    arguments = ["-m", "hbone", "cloudrun", "--timeout", "2", "--allow-unauthenticated"]
    arguments += ["--listen", "127.0.0.1:0", "--metadata", "127.0.0.1:0", "--dir", str(tmp_path / "run")]
    front_end = Process("cloudrun", [*arguments, "--container", str(world.container)], {}, tmp_path)
    program = (
        "import os, sys; from hbone import cli, tunnel_end; tunnel_end.TIMEOUT_STEP_S = 2.0; "
        "sys.exit(cli.run(sys.argv[1:], os.environ))"
    )
    try:
        way = ["--ca", printed(front_end, "CLOUDRUN_CA"), "--connect", printed(front_end, "CLOUDRUN_ADDRESS")]
        hbone = (sys.executable, "-c", program, "--no-token", *way, f"{SERVICE_URL}/_hbone/22")
        with session(config, *proxied(*hbone), "hello") as process:
            told = last_words(process)
    finally:
        front_end.stop()
    assert re.match(
        rf"hbone: {SERVICE_URL}/_hbone/22: ended after [0-9.]+ s: the service's request timeout\?", told
    )

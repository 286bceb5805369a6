"""`hbone doctor` and `hgate doctor` as processes, on the whole path and before programs that are not ours."""

from __future__ import annotations

import getpass
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hbone.demo.mesh import HOST, SERVICE_URL, SNI, TRUST_DOMAIN
from shared.address import Address
from shared.credentials.certificates.authority import Authority
from shared.doctor.failures import Failure
from shared.doctor.hops import GATEWAY, PATH
from shared.errors import EXIT_OK
from shared.trust.spiffe import SpiffeId
from tests.hbone.doctor import failures_made
from tests.path.app import App
from tests.path.krun_peers import haproxy, krun, nghttpx
from tests.path.programs import envoy
from tests.path.sshd import new_key, openssh
from tests.support.envoy_config import HTTP2, bootstrap, cluster_of, http_chain
from tests.support.network import free_port
from tests.support.world import CALLER, PATIENCE_S, WORKLOAD, Identity, World, running, said

STRANGER = SpiffeId.of_workload(TRUST_DOMAIN, "elsewhere", "client")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a doctor has said."""

    code: int
    told: dict[str, Any]

    def assert_found(self, failure: Failure) -> None:
        """Holds that it has found this one, and nothing behind it."""
        assert self.told["failure"] is not None, self.told
        assert self.told["failure"]["name"] == failure.name, self.told
        assert self.told["failure"]["hop"] == failure.hop.word
        assert self.code == self.told["exit_code"] == failure.hop.exit_code


def doctor(program: str, *arguments: object, environ: dict[str, str] | None = None) -> Seen:
    """Runs `PROGRAM doctor ARGUMENTS --json`."""
    command = [sys.executable, "-m", program, "doctor", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environ)
    assert done.stderr == ""
    return Seen(done.returncode, json.loads(done.stdout))


def through(world: World, caller: Identity | None, *more: object, sni: str = SNI) -> Seen:
    """A look through hgate, as `caller`."""
    shown = () if caller is None else ("--cert", caller.certificates, "--key", caller.key)
    return doctor("hbone", "--gateway", world.gateway, "--sni", sni, *shown, *more)


def hello(client: socket.socket) -> None:
    """An app of HTTP/1.1."""
    while (asked := client.recv(4096)) and b"\r\n\r\n" in asked:
        client.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App(hello) as app:
        yield app


# A healthy path.


def test_through_the_gateway_to_the_mtls_end(world: World) -> None:
    seen = through(world, world.caller, "--ca", world.caller.roots, "--peer", str(WORKLOAD))
    assert (seen.code, seen.told["ok"]) == (EXIT_OK, True), seen.told
    assert [hop["name"] for hop in seen.told["hops"]] == [hop.word for hop in GATEWAY]
    details = {hop["name"]: hop["detail"] for hop in seen.told["hops"]}
    assert details["peer"].startswith(f"{WORKLOAD}, certificate until ")
    assert details["policy"] == "HEAD / was answered HTTP/1.1 204 No Content"


def test_to_the_container(world: World) -> None:
    tokens = {"GCE_METADATA_HOST": world.metadata, "PATH": ""}
    there = ("--connect", world.front_end, "--ca", world.front_end_ca)
    seen = doctor("hbone", f"{SERVICE_URL}/_hbone/15003", *there, environ=tokens)
    assert (seen.code, seen.told["failure"]) == (EXIT_OK, None), seen.told
    assert [hop["name"] for hop in seen.told["hops"]] == [hop.word for hop in PATH]
    assert {hop["name"] for hop in seen.told["hops"] if hop["verdict"] == "SKIP"} == {"dns", "proxy", "ssh"}


ROOT = Path(__file__).parent.parent.parent

SHAPES = {
    "credentials": r"a token, audience (\S+), subject \d+, email \S+@\S+, expires [-0-9T:]+Z",
    "dns": r"\S+: [0-9a-f.:, ]+",
    "tcp": r"[0-9a-f.:]+ port \d+",
    "tls": r"TLSv1\.3, hello\.a\.run\.app by [-\w .]+, certificate until [-0-9T:]+Z \(\d+ (h|days)\)",
    "alpn": r"HTTP/2, streams on a connection: \d+",
    "token": r"audience https://hello\.a\.run\.app, expires in \d+ min",
    "front end": r"answered 200, by \S.*",
    "krun": r"krun \S+, targets 15003, 15008, 22",
    "ssh": r"SSH-2\.0-OpenSSH_\S+.*, ssh-ed25519 SHA256:[A-Za-z0-9+/]{43}",
}
"""Details that differ from run to run."""


def rows(text: str) -> dict[str, tuple[str, str]]:
    """The rows of a report: verdict and detail by name."""
    found = re.findall(r"^  (\S.*?)  +(PASS|FAIL|SKIP)(?: +\d+ ms)?  +(.*)$", text, re.MULTILINE)
    return {name: (verdict, detail) for name, verdict, detail in found}


def test_a_healthy_path_is_as_the_document_shows_it(tmp_path: Path) -> None:
    document = (ROOT / "docs" / "doctor.md").read_text()
    shown = document.partition("A healthy path:\n\n```text\n")[2].partition("```")[0]
    with (
        openssh(tmp_path) as sshd,
        running(tmp_path, inbound="none", app=sshd.address, environ=sshd.environ) as world,
    ):
        there = ("--connect", f"localhost:{world.front_end.port}", "--ca", world.front_end_ca)
        command = [sys.executable, "-m", "hbone", "doctor", f"{SERVICE_URL}/_hbone/22", *map(str, there)]
        environ = {"GCE_METADATA_HOST": world.metadata, "PATH": "", "HOME": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environ)
    assert (done.returncode, done.stderr) == (EXIT_OK, "")
    seen, told = rows(done.stdout), rows(shown)
    assert list(seen) == list(told) == [hop.word for hop in PATH]
    for name, (verdict, detail) in seen.items():
        assert verdict == told[name][0]
        if name in SHAPES:
            assert re.fullmatch(SHAPES[name], detail), detail
            assert re.fullmatch(SHAPES[name], told[name][1]), told[name][1]
        else:
            assert detail == told[name][1]
    for text in (done.stdout, shown):
        lines = text.splitlines()
        assert lines[-1] == "PASS: no hop has failed"
        headings = [line for line in lines if line and line[0].islower() and not line.startswith("http")]
        assert headings == ["this machine", "the way there", "the service", "the container"]


@pytest.mark.parametrize("kind", ["openssh", "builtin"])
def test_the_fingerprint_of_kruns_own_sshd(tmp_path: Path, kind: str) -> None:
    """It is the one in krun's log."""
    key = new_key(tmp_path / "user_key")
    told = {
        "HBONE_SSH": kind,
        "SSH_AUTH": key.with_suffix(".pub").read_text(),
        "HBONE_SSH_USER": getpass.getuser(),
        "HBONE_SSH_LISTEN": f"127.0.0.1:{free_port()}",
    }
    with krun(tmp_path, **told) as (process, container):
        record = process.wait_for(lambda record: said(record).startswith("sshd on "), PATIENCE_S)
        logged = re.search(r"host key (SHA256:\S+)", said(record))
        assert logged is not None
        seen = look_at(container)
    assert (seen.code, seen.told["failure"]) == (EXIT_OK, None)
    last = seen.told["hops"][-1]
    assert (last["name"], last["detail"].rpartition(" ")[2]) == ("ssh", logged[1])


# The gateway, and the workload's mTLS end.


def peer_untrusted(world: World) -> Seen:
    return through(world, world.caller, "--ca", world.front_end_ca)


def peer_identity(world: World) -> Seen:
    return through(world, world.caller, "--ca", world.caller.roots, "--peer", str(CALLER))


def certificate_wanted(world: World) -> Seen:
    return through(world, None, "--ca", world.caller.roots)


def certificate_refused(world: World) -> Seen:
    others = Authority.create(TRUST_DOMAIN)
    alien = world.identity("alien", others, others.issue(CALLER))
    return through(world, alien, "--ca", world.caller.roots)


def policy_denied(world: World) -> Seen:
    stranger = world.identity("stranger", world.mesh, world.mesh.issue(STRANGER))
    return through(world, stranger, "--ca", world.caller.roots)


IN_THE_MESH: dict[Failure, Callable[[World], Seen]] = {
    Failure.PEER_UNTRUSTED: peer_untrusted,
    Failure.PEER_IDENTITY: peer_identity,
    Failure.CERTIFICATE_WANTED: certificate_wanted,
    Failure.CERTIFICATE_REFUSED: certificate_refused,
    Failure.POLICY_DENIED: policy_denied,
}


@pytest.mark.parametrize("failure", IN_THE_MESH, ids=lambda failure: failure.name)
def test_a_failure_in_the_mesh(world: World, failure: Failure) -> None:
    IN_THE_MESH[failure](world).assert_found(failure)


# What lies between.


def look_at(address: Address, *more: object) -> Seen:
    return doctor("hbone", f"http://{address}/_hbone/22", *more)


def http1_to_krun(folder: Path) -> Seen:
    """As Cloud Run does where the port is not named h2c."""
    with (
        krun(folder) as (_, container),
        nghttpx(folder, container, front=";no-tls", back=";;proto=http/1.1") as front,
    ):
        return look_at(front)


def http2_to_http1(folder: Path) -> Seen:
    """An app of HTTP/1.1 behind a front end that speaks HTTP/2 to it."""

    def refuse(client: socket.socket) -> None:
        client.recv(1000)
        client.sendall(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")

    with App(refuse) as app, envoy_before(folder, app.address) as front:
        return look_at(front)


@contextmanager
def envoy_before(folder: Path, behind: Address) -> Iterator[Address]:
    route = {"match": {"prefix": "/"}, "route": {"cluster": "app"}}
    cluster = cluster_of("app", behind, typed_extension_protocol_options=HTTP2)
    with envoy("front", bootstrap(http_chain("in", [route], codec_type="HTTP2"), cluster), folder) as address:
        yield address


def half_duplex(folder: Path) -> Seen:
    """HAProxy waits for whole requests where it is told to."""
    waits = "proto h2\n  option http-buffer-request\n  timeout http-request 30s"
    with krun(folder) as (_, container), haproxy(folder, container, waits) as front:
        return look_at(front, "--timeout", 1)


BETWEEN: dict[Failure, Callable[[Path], Seen]] = {
    Failure.HTTP1_TO_KRUN: http1_to_krun,
    Failure.HTTP2_TO_HTTP1: http2_to_http1,
    Failure.HALF_DUPLEX: half_duplex,
}


@pytest.mark.parametrize("failure", BETWEEN, ids=lambda failure: failure.name)
def test_a_failure_of_what_lies_between(tmp_path: Path, failure: Failure) -> None:
    BETWEEN[failure](tmp_path).assert_found(failure)


def test_each_failure_of_the_catalogue_is_made_in_a_test() -> None:
    assert {*failures_made.MADE, *IN_THE_MESH, *BETWEEN} == set(Failure)


# hgate doctor.


def test_each_route_from_the_gateway(world: World) -> None:
    closed = free_port()
    file = world.folder / "doctor.yaml"
    (world.folder / "bad-token").write_text("no-token-of-anybody")
    tunnel = f'tunnel: "{SERVICE_URL}/_hbone/15003", connect: "{world.front_end}", ca: "{world.front_end_ca}"'
    file.write_text(
        f"""\
routes:
  - {{host: "{HOST}", {tunnel}, token: {{audience: "{SERVICE_URL}"}}}}
  - {{host: "refused.example", {tunnel}, token: {{file: "bad-token"}}}}
  - {{host: "closed.example", forward: "127.0.0.1:{closed}"}}
  - {{host: "open.example", forward: "{world.front_end}"}}
  - {{host: "**.demo.svc", tunnel: "https://{{service}}.a.run.app/_hbone/15003"}}
"""
    )
    environ = {"GCE_METADATA_HOST": world.metadata, "PATH": ""}
    seen = doctor("gateway", "--config", file, environ=environ)
    assert [(one["name"], one["verdict"]) for one in seen.told["routes"]] == [
        (HOST, "PASS"),
        ("refused.example", "FAIL"),
        ("closed.example", "FAIL"),
        ("open.example", "PASS"),
        ("**.demo.svc", "SKIP"),
    ]
    reports = [one["report"] for one in seen.told["routes"]]
    assert [report["exit_code"] for report in reports if report] == [0, 88, 85, 0]
    assert seen.code == seen.told["exit_code"] == 85, "the nearest"
    assert seen.told["routes"][4]["reason"].endswith("give one with --sni or --authority")

    seen = doctor("gateway", "--config", file, "--sni", SNI, environ=environ)
    assert (seen.code, [one["verdict"] for one in seen.told["routes"]]) == (EXIT_OK, ["PASS"])
    seen = doctor("gateway", "--config", file, "--sni", "nobody.example", environ=environ)
    assert seen.code == Failure.NO_ROUTE.hop.exit_code

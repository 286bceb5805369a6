"""curl with a client certificate, through the whole path to an HTTP app that krun has started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hbone.demo.mesh import SNI
from shared.credentials.certificates.authority import Authority
from shared.trust.spiffe import SpiffeId
from tests.path.programs import MUCH_BYTES, random_file, run, sha256
from tests.support.world import INBOUNDS, PATIENCE_S, Identity, World, find_program, running

AT_ONCE = 20
TRIES = 10
UNKNOWN_SNI = "outbound_.8080_._.elsewhere.prod.svc.cluster.local"

SSL_CONNECT_ERROR = 35
RECV_ERROR = 56
HTTP_ERROR = 22
"""curl(1), "Exit codes": in TLS 1.3 a client hears of its certificate's refusal when it reads."""


@pytest.fixture(scope="module", params=INBOUNDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    app = (sys.executable, "-m", "hbone.demo.app")
    with running(tmp_path_factory.mktemp(request.param), inbound=request.param, app=app) as world:
        yield world


def curl(
    world: World, *arguments: str | Path, sni: str = SNI, caller: Identity | None = None, proof: bool = True
) -> subprocess.CompletedProcess[bytes]:
    caller = caller or world.caller
    return run(
        find_program("curl"),
        *("--silent", "--show-error", "--fail", "--max-time", str(PATIENCE_S)),
        *("--cacert", caller.roots),
        *(("--cert", caller.certificates, "--key", caller.key) if proof else ()),
        *("--resolve", f"{sni}:{world.gateway.port}:{world.gateway.host}"),
        *arguments,
        f"https://{sni}:{world.gateway.port}/hello",
    )


def test_get(world: World) -> None:
    done = curl(world)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"hello from the app, you asked for /hello\n"


def test_http2_is_offered_and_not_agreed_for_the_app_speaks_http1(world: World) -> None:
    assert curl(world, "--http2", "--output", "/dev/null", "--write-out", "%{http_version}").stdout == b"1.1"


def test_64_mib_there_and_back(world: World, tmp_path: Path) -> None:
    body = random_file(tmp_path / "body", MUCH_BYTES)
    done = curl(world, "--data-binary", f"@{body}", "--output", tmp_path / "answer")
    assert (done.returncode, done.stderr) == (0, b"")
    assert sha256(tmp_path / "answer") == sha256(body)


def test_twenty_at_once(world: World, tmp_path: Path) -> None:
    bodies = [random_file(tmp_path / f"{number}", 100_000 + number) for number in range(AT_ONCE)]

    def post(body: Path) -> bool:
        done = curl(world, "--data-binary", f"@{body}")
        return (done.returncode, done.stderr, done.stdout) == (0, b"", body.read_bytes())

    with ThreadPoolExecutor(AT_ONCE) as threads:
        assert list(threads.map(post, bodies)) == [True] * AT_ONCE


# Refused. Each is told as a TLS alert, and the next caller is served as ever.


def refusal(
    world: World, *, sni: str = SNI, caller: Identity | None = None, proof: bool = True
) -> tuple[int, str]:
    """curl's exit code and reason; more than one try for Envoy's sake.

    Envoy closes on unread bytes, so its alert and the RST that overtakes it race (RFC 9112 section 9.6).
    """
    for _ in range(TRIES if world.inbound == "envoy" else 1):
        done = curl(world, sni=sni, caller=caller, proof=proof)
        reason = done.stderr.decode()
        assert (done.returncode != 0, done.stdout) == (True, b""), reason
        if not reason.endswith("Connection reset by peer\n"):
            break
    assert curl(world).returncode == 0
    return done.returncode, reason


def test_an_authority_that_the_mesh_does_not_trust(world: World) -> None:
    other = Authority.create("other.local")
    pair = other.issue(SpiffeId.of_workload("other.local", "demo", "client"))
    code, reason = refusal(world, caller=world.identity("stranger", other, pair))
    assert code in (SSL_CONNECT_ERROR, RECV_ERROR)
    assert "alert unknown ca" in reason


def test_a_trust_domain_that_is_not_allowed(world: World) -> None:
    pair = world.mesh.issue(SpiffeId.of_workload("other.local", "demo", "client"))
    code, reason = refusal(world, caller=world.identity("foreigner", world.mesh, pair))
    if world.inbound == "envoy":  # which knows that they speak HTTP
        assert code == HTTP_ERROR
        assert "error: 403" in reason
    else:
        assert code in (SSL_CONNECT_ERROR, RECV_ERROR)
        assert "alert internal error" in reason


def test_no_client_certificate(world: World) -> None:
    code, reason = refusal(world, proof=False)
    assert code in (SSL_CONNECT_ERROR, RECV_ERROR)
    assert "alert certificate required" in reason


def test_a_name_without_a_route(world: World) -> None:
    code, reason = refusal(world, sni=UNKNOWN_SNI)
    assert code == SSL_CONNECT_ERROR
    assert "unrecognized name" in reason

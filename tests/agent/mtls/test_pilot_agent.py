"""What pilot-agent is started with, and what becomes of what it says. With the real one: tests/mesh."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from agent.config.pilot_settings import PilotSettings, find_program
from agent.config.settings import from_env
from agent.mtls.pilot_agent import PilotAgent, environment
from shared.credentials.certificates import certificate_writer
from shared.credentials.certificates.authority import Authority
from shared.errors import UnavailableError
from tests.support.metadata_server import PATIENCE_S

HELLO = {
    "XDS_ADDR": "istiod.istio-system.svc:15012",
    "WORKLOAD_NAME": "hello",
    "WORKLOAD_NAMESPACE": "demo",
    "WORKLOAD_SERVICE_ACCOUNT": "hello-account",
    "TRUST_DOMAIN": "mesh.local",
}


def settings(**environ: str) -> PilotSettings:
    return from_env({**HELLO, **environ}).pilot


def program(folder: Path, text: str) -> Path:
    """A pilot-agent, as a script, where all users may run it."""
    folder.mkdir(exist_ok=True)
    path = folder / "pilot-agent"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def roots(tmp_path: Path) -> str:
    return Authority.create("mesh.local").root_pem.decode()


@pytest.fixture(autouse=True)
def ourselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user could not look into the test's folder."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def test_it_is_found(tmp_path: Path) -> None:
    there = program(tmp_path / "bin", "exit 0")
    assert find_program("", str(there.parent)) == there
    assert find_program(str(there), "/nowhere") == there
    with pytest.raises(UnavailableError, match="HBONE_PILOT_AGENT=pilot-1: no such program"):
        find_program("pilot-1", str(there.parent))


def test_its_environment(tmp_path: Path) -> None:
    told = environment(settings(), tmp_path, Path("/bin/envoy"), "10.1.2.3")
    assert json.loads(told["PROXY_CONFIG"]) == {
        "configPath": f"{tmp_path}/etc/istio/proxy",
        "serviceCluster": "hello.demo",
        "concurrency": 1,
        "statusPort": 15030,
        "terminationDrainDuration": "1s",
        "discoveryAddress": "istiod.istio-system.svc:15012",
        "binaryPath": "/bin/envoy",
    }
    assert told["CA_ADDR"] == "istiod.istio-system.svc:15012"
    assert told["ENVOY_STATUS_PORT"] == "15031"
    named = ("POD_NAME", "POD_NAMESPACE", "SERVICE_ACCOUNT", "TRUST_DOMAIN", "INSTANCE_IP")
    assert [told[name] for name in named] == ["hello", "demo", "hello-account", "mesh.local", "10.1.2.3"]


def test_what_the_user_says_counts(tmp_path: Path) -> None:
    given = settings(
        PROXY_CONFIG='{"concurrency": 4, "discoveryAddress": "other:1"}', ISTIO_META_MESH_ID="proj-42"
    )
    told = environment(given, tmp_path, None, "10.1.2.3")
    proxy = json.loads(told["PROXY_CONFIG"])
    assert (proxy["concurrency"], proxy["discoveryAddress"], "binaryPath" in proxy) == (4, "other:1", False)
    assert (told["CA_ADDR"], told["ISTIO_META_MESH_ID"]) == ("other:1", "proj-42")


def test_istiod_s_ca_signs_or_krun_keeps_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a token the certificate that krun keeps is what istiod is shown, too."""
    path = str(program(tmp_path / "bin", "exit 0").parent)
    token = tmp_path / "token"
    given = {"PATH": path, "HBONE_K8S_TOKENS": f"istio-ca={token}", "HBONE_CERTS": "/certs"}
    by_istiod = settings(**given)
    told = environment(by_istiod, tmp_path, None, "10.1.2.3")
    assert (by_istiod.kept_certificates, told["CA_PROVIDER"]) == (None, "Citadel")
    assert "proxyMetadata" not in told["PROXY_CONFIG"]
    kept = settings(**given, HBONE_CA="istio", PROXY_CONFIG='{"proxyMetadata": {"A": "b"}}')
    told = environment(kept, tmp_path, None, "10.1.2.3")
    assert (kept.kept_certificates, told["CA_PROVIDER"]) == (Path("/certs"), "GkeWorkloadCertificate")
    assert json.loads(told["PROXY_CONFIG"])["proxyMetadata"] == {
        "ISTIO_META_TLS_CLIENT_CERT_CHAIN": "/certs/certificates.pem",
        "ISTIO_META_TLS_CLIENT_KEY": "/certs/private_key.pem",
        "A": "b",
    }
    token.write_text("t")
    told = environment(kept, tmp_path, None, "10.1.2.3")
    assert json.loads(told["PROXY_CONFIG"])["proxyMetadata"] == {"A": "b"}


async def test_its_folder_looks_like_a_pod_s(tmp_path: Path, roots: str) -> None:
    seen = tmp_path / "seen"
    files = "etc/istio/pod/labels var/run/secrets/istio/root-cert.pem"
    look = f'cd "$HOME"; (cat {files}; ls -l var/run/secrets/tokens) >{seen}'
    given = settings(CAROOT_ISTIOD=roots, HBONE_K8S_TOKENS="istio-ca=/tokens/istio")
    agent = await PilotAgent.start(program(tmp_path, look), given, None, os.environ["PATH"])
    with pytest.raises(UnavailableError, match="pilot-agent ended: exit code 0"):
        await agent.ready(PATIENCE_S)
    await agent.stop(PATIENCE_S)
    text = seen.read_text()
    assert 'app="hello"\nservice.istio.io/canonical-name="hello"\n' in text
    assert roots in text
    assert "istio-token -> /tokens/istio" in text


async def test_certificates_that_krun_keeps_are_where_gke_mounts_them(tmp_path: Path) -> None:
    """Their roots are istiod's, too, if no others are told."""
    seen, certs = tmp_path / "seen", tmp_path / "certs"
    authority = Authority.create("mesh.local")
    issued = authority.issue(dns_names=["hello"])
    certificate_writer.write(
        certs, certificate_writer.Contents(issued.certificate_pem, issued.key_pem, authority.root_pem)
    )
    given = replace(settings(), kept_certificates=certs)
    files = "var/run/secrets/workload-spiffe-credentials/certificates.pem var/run/secrets/istio/root-cert.pem"
    there = program(tmp_path / "bin", f'cd "$HOME"; cat {files} >{seen}')
    agent = await PilotAgent.start(there, given, None, os.environ["PATH"])
    with pytest.raises(UnavailableError, match="pilot-agent ended: exit code 0"):
        await agent.ready(PATIENCE_S)
    await agent.stop(PATIENCE_S)
    assert seen.read_bytes() == issued.certificate_pem + authority.root_pem


async def test_it_inherits_no_secret(tmp_path: Path, roots: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", "correct horse")
    seen = tmp_path / "seen"
    agent = await PilotAgent.start(
        program(tmp_path, f"env >{seen}"), settings(CAROOT_ISTIOD=roots), None, os.environ["PATH"]
    )
    with pytest.raises(UnavailableError):
        await agent.ready(PATIENCE_S)
    await agent.stop(PATIENCE_S)
    assert "correct horse" not in seen.read_text()


async def test_its_last_error_is_in_the_message(tmp_path: Path, roots: str) -> None:
    says = (
        r"printf '2026-11-22T10:00:00Z\terror\tenvoy config source/a.cc:12\tlds: cannot bind\tthread=7\n"
        r"2026-11-22T10:00:00Z\twarn\tEnvoy proxy is NOT ready: yet\n'; exit 3"
    )
    agent = await PilotAgent.start(
        program(tmp_path, says), settings(CAROOT_ISTIOD=roots), None, os.environ["PATH"]
    )
    wanted = (
        r"pilot-agent ended: exit code 3: lds: cannot bind; is there a Sidecar in namespace demo .*app=hello"
    )
    with pytest.raises(UnavailableError, match=wanted):
        await agent.ready(PATIENCE_S)
    await agent.stop(PATIENCE_S)


async def test_one_that_never_gets_ready_is_given_up(tmp_path: Path, roots: str) -> None:
    agent = await PilotAgent.start(
        program(tmp_path, "exec sleep 60"), settings(CAROOT_ISTIOD=roots), None, os.environ["PATH"]
    )
    with pytest.raises(UnavailableError, match=r"^pilot-agent is not ready after 0\.2 s$"):
        await agent.ready(0.2)
    await agent.stop(PATIENCE_S)


async def test_without_roots_it_is_not_started(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="set HBONE_ROOTS or CAROOT_ISTIOD"):
        await PilotAgent.start(program(tmp_path, "exit 0"), settings(), None, None)


async def test_what_cannot_be_run(tmp_path: Path, roots: str) -> None:
    nothing = tmp_path / "pilot-agent"
    nothing.write_text("no program")
    with pytest.raises(UnavailableError, match="cannot start pilot-agent: Permission denied"):
        await PilotAgent.start(nothing, settings(CAROOT_ISTIOD=roots), None, None)


def test_levels_of_what_it_says(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG, "hbone.pilot_agent")
    agent = PilotAgent(tmp_path, settings(), {}, tmp_path)
    for line in (
        "2026-11-22T10:00:00Z\tinfo\tads\tconnected",
        "2026-11-22T10:00:00Z\twarning\tenvoy main source/server.cc:9\tslow\tthread=1",
        "2026-11-22T10:00:00Z\tcritical\tgone",
        '[2026-11-22T10:00:00Z] "GET / HTTP/1.1" 200',
        "concurrency: 1",
    ):
        agent._log_line(line)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("DEBUG", "ads: connected"),
        ("WARNING", "slow"),
        ("ERROR", "gone"),
        ("INFO", '[2026-11-22T10:00:00Z] "GET / HTTP/1.1" 200'),
        ("DEBUG", "concurrency: 1"),
    ]

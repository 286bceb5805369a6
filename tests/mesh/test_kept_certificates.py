"""pilot-agent with the certificate that krun keeps: Envoy serves it, and its successors, and istiod accepts
it."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from tests.mesh.objects import manifest
from tests.mesh.places import Process, namespace, until
from tests.mesh.test_pilot_agent import processes
from tests.mesh.workloads import Workloads, ask

RENEWED_S = 150.0
"""krun looks at its certificate once a minute."""


@pytest.fixture
def started(mesh: Workloads) -> Iterator[list[Process]]:
    mesh.plane.objects.apply(manifest("hello"))
    started: list[Process] = []
    yield started
    for process in started:
        process.end()


def started_krun(mesh: Workloads, started: list[Process], environ: Mapping[str, object]) -> Path:
    """The folder in which the krun that is started keeps its certificate."""
    folder = mesh.folder / "kept"
    kept = {"HBONE_CERTS": folder, "HBONE_CA": "istio", "CA_ADDR": mesh.plane.xds}
    krun = mesh.krun("pilot-agent", {**kept, **environ})
    started.append(krun)
    mesh.krun_ready(krun)
    return folder


def served(mesh: Workloads) -> bytes:
    """The certificate that Envoy shows on 15003, in DER."""
    own = mesh.folder / "caller"
    if not own.exists():
        mesh.plane.certify("clients", "web", own)
    command = [
        *("openssl", "s_client", "-connect", "127.0.0.1:15003", "-alpn", "istio"),
        *("-cert", own / "certificates.pem", "-key", own / "private_key.pem"),
    ]
    words = ["ip", "netns", "exec", namespace("app"), *map(str, command)]
    said = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30).stdout
    begin, end = said.find(ssl.PEM_HEADER), said.find(ssl.PEM_FOOTER)
    assert begin >= 0, said
    return ssl.PEM_cert_to_DER_cert(f"{said[begin:end]}{ssl.PEM_FOOTER}")


def in_file(folder: Path) -> bytes:
    leaf = x509.load_pem_x509_certificates((folder / "certificates.pem").read_bytes())[0]
    return leaf.public_bytes(Encoding.DER)


@pytest.mark.timeout(300)
def test_envoy_serves_what_krun_keeps_and_renews(mesh: Workloads, started: list[Process]) -> None:
    lives = {"HBONE_CERT_LIFETIME": "3m", "HBONE_CERT_RENEW_AT": "0.2"}
    folder = started_krun(mesh, started, lives)
    first, running = served(mesh), (processes("envoy"), processes("pilot-agent"))
    assert first == in_file(folder)
    assert ask("web").status == 200
    until(lambda: True if in_file(folder) != first else None, RENEWED_S, "krun renews it")
    until(lambda: True if served(mesh) == in_file(folder) else None, 10, "Envoy serves the new one")
    assert ask("web").status == 200
    assert (processes("envoy"), processes("pilot-agent")) == running, "nobody was started again"


def test_without_a_token_istiod_is_shown_the_certificate(mesh: Workloads, started: list[Process]) -> None:
    """krun, too, renews what it has found with the certificate itself."""
    mesh.plane.certify("demo", "hello", mesh.folder / "kept")
    folder = started_krun(mesh, started, {"HBONE_K8S_TOKENS": "", "HBONE_CA_TOKEN_FILE": "-"})
    assert served(mesh) == in_file(folder)
    assert ask("web").status == 200

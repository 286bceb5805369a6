"""istiod as the authority of krun's certificate: what proves us, whose certificate it is, and what krun says
where it comes to nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from shared.address import Address
from shared.credentials.certificates.istio_ca import IstioCa
from shared.credentials.certificates.signing import Signed
from shared.errors import EXIT_DENIED
from tests.mesh.control_plane import ADDRESS, ControlPlane
from tests.mesh.places import Process, until
from tests.mesh.plugged_in import plugged_in
from tests.mesh.workloads import Workloads
from tests.support.certificate_requests import gives, key_pem, new_key, refusal, request_pem

ISTIOD = Address(ADDRESS, 15012)

IDENTITY = "spiffe://cluster.local/ns/demo/sa/hello"

OUTAGE_S = 150.0
"""krun looks once a minute at its certificate, and tries a minute after a failure."""


def authority(
    plane: ControlPlane, token: str | None = None, proof: tuple[Path, Path] | None = None
) -> IstioCa:
    roots = plane.root.encode()
    return IstioCa(
        ISTIOD, roots=lambda: roots, token=None if token is None else gives(token), certificate=proof
    )


def signed(ca: IstioCa, key: object, lifetime_s: float = 3600.0) -> Signed:
    return asyncio.run(ca.sign(request_pem(key), lifetime_s))  # type: ignore[arg-type]


def leaf_of(chain_pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificates(chain_pem)[0]


def names(leaf: x509.Certificate) -> list[str]:
    alternative = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return alternative.get_values_for_type(x509.UniformResourceIdentifier)


def test_a_token_and_then_the_certificate_itself(plane: ControlPlane, tmp_path: Path) -> None:
    key = new_key()
    first = signed(authority(plane, plane.objects.token("demo", "hello", "istio-ca")), key)
    assert names(leaf_of(first.chain_pem)) == [IDENTITY]
    assert leaf_of(first.chain_pem).not_valid_after_utc - datetime.now(UTC) <= timedelta(hours=1)
    (tmp_path / "chain.pem").write_bytes(first.chain_pem)
    (tmp_path / "key.pem").write_bytes(key_pem(key))
    proof = (tmp_path / "chain.pem", tmp_path / "key.pem")
    second = signed(authority(plane, proof=proof), new_key())
    assert names(leaf_of(second.chain_pem)) == [IDENTITY]
    assert leaf_of(second.chain_pem).serial_number != leaf_of(first.chain_pem).serial_number


def test_a_token_for_somebody_else_is_refused_with_a_hint(plane: ControlPlane) -> None:
    token = plane.objects.token("demo", "hello", "vault")
    said = asyncio.run(refusal(authority(plane, token), token))
    assert said.startswith("Istio's CA at 10.77.0.1:15012 refused: UNAUTHENTICATED")
    assert said.endswith("is the token for the audience istio-ca, and of the cluster that CLUSTER_ID names?")


# krun.


@pytest.fixture
def workloads(plane: ControlPlane) -> Workloads:
    return Workloads(plane)


@pytest.fixture
def started() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.end()


def ended(krun: Process) -> str:
    """The last line of a krun that has not started, and nothing of its app."""
    assert krun.started.wait(60) == EXIT_DENIED
    last = krun.said.strip().splitlines()[-1]
    assert "Traceback" not in krun.said
    return last


def test_an_identity_that_is_not_the_token_s(workloads: Workloads, plane: ControlPlane) -> None:
    """istiod signs for the token's account, whatever is asked for."""
    other = plane.folder / "web-token"
    other.write_text(plane.objects.token("clients", "web", "istio-ca"))
    krun = workloads.krun("builtin", {"HBONE_CA_TOKEN_FILE": other, "HBONE_CA_TIMEOUT": "3s"})
    last = ended(krun)
    asked, given = "spiffe://cluster.local/ns/demo/sa/hello", "spiffe://cluster.local/ns/clients/sa/web"
    variables = "WORKLOAD_NAMESPACE is demo and WORKLOAD_SERVICE_ACCOUNT is hello"
    told = (
        f"the certificate is for {given}, not for {asked}; the authority goes by the token, and {variables}"
    )
    assert last.endswith(told)


def test_without_the_mesh_s_roots(workloads: Workloads) -> None:
    krun = workloads.krun("builtin", {"HBONE_ROOTS": "", "HBONE_CA_TIMEOUT": "3s"})
    last = ended(krun)
    told = "no roots of the mesh are set (HBONE_ROOTS, CAROOT_ISTIOD), so only public ones are trusted"
    assert last.endswith(f"certificate; {told}")


@pytest.mark.timeout(300)
def test_an_outage_across_a_renewal(workloads: Workloads, started: list[Process]) -> None:
    """A certificate for two minutes, to be renewed after 24 seconds."""
    lives = {"HBONE_CERT_LIFETIME": "3m", "HBONE_CERT_RENEW_AT": "0.2"}
    krun = workloads.krun("builtin", lives)
    started.append(krun)
    workloads.krun_ready(krun)
    written = workloads.folder / "krun" / "certs" / "certificates.pem"
    first = leaf_of(written.read_bytes())
    workloads.plane.istiod.end()
    until(lambda: True if "not renewed" in krun.said else None, OUTAGE_S, "a renewal fails")
    assert leaf_of(written.read_bytes()) == first
    workloads.plane.start_istiod()
    until(
        lambda: True if leaf_of(written.read_bytes()) != first else None,
        OUTAGE_S,
        "the certificate is renewed",
    )


def test_a_plugged_in_authority_with_an_old_root(plane: ControlPlane, workloads: Workloads) -> None:
    """A chain with an intermediate, and both roots for the peers, as during a change of roots."""
    with plugged_in(plane) as new_root:
        got = signed(authority(plane, plane.objects.token("demo", "hello", "istio-ca")), new_key())
        chain = x509.load_pem_x509_certificates(got.chain_pem)
        assert names(chain[0]) == [IDENTITY]
        assert chain[-1].issuer == new_root.subject

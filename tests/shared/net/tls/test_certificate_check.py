"""Each thing that can be wrong with certificate, key and roots, and what is said of it."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.credentials.certificates.authority import Authority
from shared.net.tls import certificate_check
from shared.net.tls.certificate_check import (
    MAX_CHAIN,
    Findings,
    check_answer,
    load_chain,
    public_key_der,
    read,
)
from shared.net.tls.certificate_folder import CertificatePaths, find
from shared.trust.spiffe import SpiffeId
from tests.support.locked_key import locked

HELLO = SpiffeId.of_workload("demo.local", "demo", "hello")
DAY = timedelta(days=1)


def now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture(scope="module")
def mesh() -> Authority:
    return Authority.create("demo.local")


@pytest.fixture
def paths(tmp_path: Path, mesh: Authority) -> CertificatePaths:
    mesh.write(tmp_path, mesh.issue(HELLO))
    return find(tmp_path)


def test_a_good_folder(paths: CertificatePaths, mesh: Authority) -> None:
    found = read(paths, now())
    assert (found.faults, found.chain_fault) == ((), "")
    assert (found.identity, found.key_kind, found.key_matches) == (HELLO, "EC secp256r1", True)
    assert (len(found.chain), found.roots) == (1, (mesh.root,))


def test_nothing_there(tmp_path: Path) -> None:
    assert read(find(tmp_path), now()).faults == (
        f"{tmp_path}/certificates.pem: No such file or directory",
        f"{tmp_path}/private_key.pem: No such file or directory",
        f"{tmp_path}/ca_certificates.pem: No such file or directory",
    )


def test_a_folder_in_place_of_a_file(paths: CertificatePaths) -> None:
    paths.private_key.unlink()
    paths.private_key.mkdir()
    assert read(paths, now()).faults == (f"{paths.private_key}: it is a directory, not a regular file",)


@pytest.mark.parametrize(
    "content", [b"", b"no PEM", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_what_is_no_certificate(paths: CertificatePaths, content: bytes) -> None:
    paths.certificates.write_bytes(content)
    paths.roots.write_bytes(content)
    assert read(paths, now()).faults == (
        f"{paths.certificates}: no certificate chain: no certificates in PEM, or broken ones",
        f"{paths.roots}: no usable root certificates: no certificates in PEM, or broken ones",
    )


def test_a_chain_without_end(paths: CertificatePaths) -> None:
    paths.certificates.write_bytes(paths.certificates.read_bytes() * (MAX_CHAIN + 1))
    (fault,) = read(paths, now()).faults
    assert fault == f"{paths.certificates}: no certificate chain: 11 certificates, more than 10"


def test_a_file_without_end(paths: CertificatePaths) -> None:
    with paths.roots.open("ab") as file:
        file.truncate(1 << 30)
    (fault,) = read(paths, now()).faults
    assert fault == f"{paths.roots}: it is longer than 4194304 bytes"


def test_somebody_elses_key(paths: CertificatePaths, mesh: Authority) -> None:
    paths.private_key.write_bytes(mesh.issue(HELLO).key_pem)
    found = read(paths, now())
    assert not found.key_matches
    assert found.faults == (f"{paths.private_key}: not the key of the certificate in {paths.certificates}",)


def test_keys_that_are_of_no_use(paths: CertificatePaths) -> None:
    other = ed25519.Ed25519PrivateKey.generate()
    for content, told in (
        (locked(paths.private_key.read_bytes()), "the private key is encrypted"),
        (b"", "no private key in PEM"),
        (b"no key", "no private key in PEM"),
        (paths.certificates.read_bytes(), "no private key in PEM"),
        (
            other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            "the private key is neither RSA nor EC",
        ),
    ):
        paths.private_key.write_bytes(content)
        found = read(paths, now())
        assert found.faults == (f"{paths.private_key}: {told}",)
        assert not found.key_matches


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 300), junk=st.binary(max_size=20))
def test_no_text_about_a_broken_key_has_anything_of_it(
    paths: CertificatePaths, cut: int, junk: bytes
) -> None:
    key = Authority.create("demo.local").issue(HELLO).key_pem
    paths.private_key.write_bytes(key[:cut] + junk + key[cut:])
    found = read(paths, now())
    for line in key.decode().splitlines()[1:-1]:
        for start in range(0, len(line) - 8, 4):
            assert line[start : start + 8] not in repr(found)


def test_times(paths: CertificatePaths) -> None:
    (late,) = read(paths, now() + 2 * DAY).faults
    assert late.startswith(f"{paths.certificates}: the certificate expired at 20")
    assert read(paths, now() + 2 * DAY).chain_fault == "certificate has expired"
    (early,) = read(paths, now() - DAY).faults
    assert "the certificate is not valid before 20" in early
    assert read(paths, now() - timedelta(seconds=500)).faults == (), "a clock that is behind by little"


def test_an_expired_part_of_the_chain(paths: CertificatePaths, mesh: Authority) -> None:
    old = Authority.create("demo.local", lifetime_s=-100)
    paths.certificates.write_bytes(paths.certificates.read_bytes() + old.root_pem)
    (fault,) = read(paths, now()).faults
    assert f"{paths.certificates}: certificate 2 of the chain expired at" in fault


def test_a_certificate_that_names_no_workload(paths: CertificatePaths, mesh: Authority) -> None:
    pair = mesh.issue(dns_names=["hello"])
    paths.certificates.write_bytes(pair.certificate_pem)
    paths.private_key.write_bytes(pair.key_pem)
    found = read(paths, now())
    assert found.identity is None
    assert found.faults == (
        f"{paths.certificates}: it has 0 URI names instead of one, so it is no X509-SVID",
    )


def test_roots_of_others_are_no_fault_but_noted(paths: CertificatePaths) -> None:
    other = Authority.create("other.example")
    paths.roots.write_bytes(other.root_pem)
    found = read(paths, now())
    assert found.faults == ()
    assert found.chain_fault == "unable to get local issuer certificate"
    paths.roots.write_bytes(other.root_pem + Authority.create("third.example").root_pem)
    assert len(read(paths, now()).roots) == 2


def test_an_answer_is_held_against_what_was_asked(mesh: Authority) -> None:
    chain = load_chain(mesh.issue(HELLO).certificate_pem)
    key = public_key_der(chain[0])
    check_answer(chain, key, HELLO, [mesh.root], now())
    another = SpiffeId.of_workload("demo.local", "demo", "another")
    for arguments, told in (
        ((chain, secrets.token_bytes(90), HELLO, [mesh.root], now()), "not for the key"),
        ((chain, key, another, [mesh.root], now()), f"for {HELLO}, not for {another}"),
        ((chain, key, HELLO, [Authority.create("other.example").root], now()), "to none of the roots"),
        ((chain, key, HELLO, [mesh.root], now() + 2 * DAY), "expired at"),
    ):
        with pytest.raises(ValueError, match=told):
            check_answer(*arguments)


def test_kinds_of_keys() -> None:
    assert certificate_check.kind_of(rsa.generate_private_key(65537, 2048)) == "RSA 2048"
    assert certificate_check.kind_of(ec.generate_private_key(ec.SECP384R1()).public_key()) == "EC secp384r1"
    assert certificate_check.kind_of(None) == ""


def test_findings_hold_no_key(paths: CertificatePaths) -> None:
    assert not [name for name in Findings.__dataclass_fields__ if name in ("key", "key_pem", "private_key")]
    assert "PRIVATE" not in repr(read(paths, now()))


def test_times_are_shown_in_utc() -> None:
    assert certificate_check.shown(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)) == "2026-01-02T03:04:05Z"

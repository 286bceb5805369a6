"""`hbone certs`: what it prints, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from hbone import cli
from shared.credentials.certificates.authority import Authority
from shared.errors import EXIT_CONFIG, EXIT_OK
from shared.net.tls import certificate_folder
from shared.net.tls.certificate_folder import NAMES
from shared.trust.spiffe import SpiffeId
from tests.support.bundles import tell
from tests.support.revocation import Hierarchy

HELLO = SpiffeId.of_workload("demo.local", "demo", "hello")


@pytest.fixture
def mesh() -> Authority:
    return Authority.create("demo.local")


def test_a_good_folder(tmp_path: Path, mesh: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    pair = mesh.issue(HELLO)
    mesh.write(tmp_path, pair)
    leaf = x509.load_pem_x509_certificate(pair.certificate_pem)
    assert cli.run(["certs", str(tmp_path)], {}) == EXIT_OK
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert err == ""
    assert lines[0] == ["certificate", f"{tmp_path}/certificates.pem"]
    assert lines[1] == ["identity", str(HELLO)]
    assert ["issuer", "CN=throw-away", "CA", "of", "demo.local"] in lines
    assert ["serial", f"{leaf.serial_number:x}"] in lines
    (valid,) = [line for line in lines if line[0] == "valid"]
    assert valid[1:4] == [
        f"{leaf.not_valid_before_utc:%Y-%m-%dT%H:%M:%SZ}",
        "to",
        f"{leaf.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ},",
    ]
    assert valid[-1] == "left"
    assert ["kind", "EC", "secp256r1,", "the", "certificate's"] in lines
    root = " ".join(lines[-1])
    assert root.startswith("root CN=throw-away CA of demo.local, trust domain demo.local, until 20")
    assert "PRIVATE" not in out


@pytest.mark.parametrize("names", NAMES[1:])
def test_other_names(
    tmp_path: Path, mesh: Authority, names: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    pair = mesh.issue(HELLO)
    for name, content in zip(names, (pair.certificate_pem, pair.key_pem, mesh.root_pem), strict=True):
        (tmp_path / name).write_bytes(content)
    assert cli.run(["certs", str(tmp_path)], {}) == EXIT_OK
    assert f"key          {tmp_path}/{names[1]}" in capsys.readouterr().out


def test_faults_are_lines_and_an_exit_code(
    tmp_path: Path, mesh: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh.write(tmp_path, mesh.issue(HELLO, lifetime_s=-100))
    (tmp_path / "private_key.pem").write_bytes(mesh.issue(HELLO).key_pem)
    (tmp_path / "ca_certificates.pem").unlink()
    assert cli.run(["certs", str(tmp_path)], {}) == EXIT_CONFIG
    out = capsys.readouterr().out
    assert "expired 1 min 4" in out
    assert "NOT the certificate's" in out
    faults = [line for line in out.splitlines() if line.startswith("fault ")]
    assert [fault.split(": ", 1)[1][:30] for fault in faults] == [
        "No such file or directory",
        "not the key of the certificate",
        "the certificate expired at 202",
    ]


def test_roots_of_others_are_noted(
    tmp_path: Path, mesh: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh.write(tmp_path, mesh.issue(HELLO))
    (tmp_path / "ca_certificates.pem").write_bytes(Authority.create("other.example").root_pem)
    assert cli.run(["certs", str(tmp_path)], {}) == EXIT_OK
    assert "note         the chain leads to none of these roots: " in capsys.readouterr().out


def test_for_programs(tmp_path: Path, mesh: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    mesh.write(tmp_path, mesh.issue(HELLO))
    assert cli.run(["certs", "--json", str(tmp_path)], {}) == EXIT_OK
    shown = json.loads(capsys.readouterr().out)
    assert shown["files"]["private_key"] == f"{tmp_path}/private_key.pem"
    assert shown["private_key"] == {"kind": "EC secp256r1", "matches": True}
    assert shown["cert_chain"][0]["identity"] == str(HELLO)
    assert shown["ca_cert"][0]["trust_domain"] == "demo.local"
    assert (shown["chain_fault"], shown["faults"]) == ("", [])


def test_the_default_is_kruns(
    tmp_path: Path, mesh: Authority, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(certificate_folder, "FOLDERS", (tmp_path / "none", tmp_path / "there"))
    mesh.write(tmp_path / "there", mesh.issue(HELLO))
    assert cli.run(["certs"], {}) == EXIT_OK
    assert f"{tmp_path}/there/certificates.pem" in capsys.readouterr().out


def test_nothing_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(certificate_folder, "FOLDERS", (tmp_path / "a", tmp_path / "b"))
    assert cli.run(["certs"], {}) == EXIT_CONFIG
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"fault        no certificates in any of {tmp_path}/a, {tmp_path}/b: name their FOLDER"


def test_a_chain_in_the_wrong_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = Hierarchy()
    pair = mesh.issue(HELLO)
    mesh.write(tmp_path, pair)
    leaf, above = x509.load_pem_x509_certificates(pair.certificate_pem)
    chain = b"".join(one.public_bytes(Encoding.PEM) for one in (above, leaf))
    (tmp_path / "certificates.pem").write_bytes(chain)
    assert cli.run(["certs", str(tmp_path)], {}) == EXIT_CONFIG
    told = f"{tmp_path}/certificates.pem: the key's certificate is number 2, and has to be the first"
    assert f"fault        {told}" in capsys.readouterr().out.splitlines()


def test_a_key_without_a_certificate(
    tmp_path: Path, mesh: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh.write(tmp_path, mesh.issue(HELLO))
    (tmp_path / "certificates.pem").write_text("oops")
    assert cli.run(["certs", str(tmp_path)], {}) == EXIT_CONFIG
    assert "  kind       EC secp256r1" in capsys.readouterr().out.splitlines()


def test_a_map_of_bundles(tmp_path: Path, mesh: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    mesh.write(tmp_path, mesh.issue(HELLO))
    tell(tmp_path, {"demo.local": [mesh], "other.local": [mesh]})
    assert cli.run(["certs", str(tmp_path)], {}) == EXIT_OK
    assert ", trust domain demo.local, other.local, until " in capsys.readouterr().out
    (tmp_path / "trust_bundles.json").write_text("oops")
    assert cli.run(["certs", str(tmp_path)], {}) == EXIT_CONFIG
    assert f"fault        {tmp_path}/trust_bundles.json: no map of SPIFFE bundles" in capsys.readouterr().out

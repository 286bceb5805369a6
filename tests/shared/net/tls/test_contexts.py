"""TLS contexts: what they offer, what they trust under each Python, and errors that name the file."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
from pathlib import Path

import pytest

import shared
from shared.credentials.certificates.authority import Authority
from shared.errors import UnavailableError
from shared.net.tls import contexts
from shared.net.tls.contexts import (
    _files,
    check_file,
    client_context,
    client_of,
    load_own,
    load_own_pem,
    mesh_context,
    read_again,
    read_file,
    server_context,
    trust,
)
from shared.regular_files import MAX_PEM_BYTES
from tests.shared.conftest import Credentials
from tests.support import interpreters, odd_chains, tls_verdicts
from tests.support.locked_key import locked
from tests.support.revocation import revocation_list
from tests.support.tcp_peer import PATIENCE_S
from tests.support.tls_verdicts import ACCEPTED, handshake

ROOT = Path(shared.__path__[0]).parent


@pytest.mark.parametrize("old", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_nothing_older_than_tls_1_2(credentials: Credentials, old: ssl.TLSVersion) -> None:
    server = server_context(credentials.certificate, credentials.key)
    client = ssl.create_default_context(cafile=credentials.ca)
    client.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    client.maximum_version = old
    with pytest.raises(ssl.SSLError):
        handshake(client, server, "localhost")
    assert client_context(credentials.ca, 0.0).minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_clients_context_is_made_once(credentials: Credentials) -> None:
    assert client_context(credentials.ca, 0.0) is client_context(credentials.ca, 0.0)
    assert client_context(None, 0.0) is client_context(None, 0.0)
    assert client_context(credentials.ca, 0.0) is not client_context(credentials.other_ca, 0.0)


def test_a_renewed_file_counts_for_the_next_context(
    credentials: Credentials, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_bytes(credentials.other_ca.read_bytes())
    server = server_context(credentials.certificate, credentials.key)
    old = client_context(ca, 100.0)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(old, server, "localhost")
    (tmp_path / "new.pem").write_bytes(credentials.ca.read_bytes())
    (tmp_path / "new.pem").rename(ca)
    assert client_context(ca, 100.5) is old, "it is not looked at for every connection"
    handshake(client_context(ca, 102.0), server, "localhost")
    ca.write_text("no certificate here")
    handshake(client_context(ca, 104.0), server, "localhost")
    assert "keeping the certificate in use" in caplog.text
    ca.unlink()
    handshake(client_context(ca, 106.0), server, "localhost")


def test_a_file_can_be_read_again_at_once(credentials: Credentials, tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_bytes(credentials.other_ca.read_bytes())
    old = client_context(ca, 100.0)
    ca.write_text("no certificate here")
    with pytest.raises(UnavailableError):
        read_again(ca)
    assert client_context(ca, 100.0) is old
    ca.write_bytes(credentials.ca.read_bytes())
    read_again(ca)
    server = server_context(credentials.certificate, credentials.key)
    handshake(client_context(ca, 100.0), server, "localhost")


def test_the_system_s_certificates_can_be_loaded_meanwhile() -> None:
    contexts._followed.cache_clear()
    contexts.load_ahead()
    loaded = client_context(None, 0.0)
    assert contexts._followed.cache_info().misses == 1, "only the thread has loaded them"
    assert loaded is client_context(None, 0.0)


def test_the_system_s_certificates_are_watched_too() -> None:
    assert client_context(None, 0.0).verify_mode is ssl.CERT_REQUIRED
    assert all(file.exists() for file in _files(None))


def test_a_failure_is_not_remembered(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    with pytest.raises(UnavailableError):
        client_context(ca, 0.0)
    ca.write_bytes(Authority.create("late.local").root_pem)
    client_context(ca, 0.0)


def test_a_servers_files_that_cannot_be_used(credentials: Credentials, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    with pytest.raises(
        UnavailableError, match=f"^certificate {missing}, key {credentials.key}: No such file"
    ):
        server_context(missing, credentials.key)
    with pytest.raises(UnavailableError, match="No such file"):
        server_context(credentials.certificate, missing)
    other = tmp_path / "other.pem"
    other.write_bytes(Authority.create("other.local").issue(dns_names=["a"]).key_pem)
    with pytest.raises(UnavailableError) as caught:
        server_context(credentials.certificate, other)
    assert "mismatch" in str(caught.value)
    assert "PRIVATE KEY" not in str(caught.value)


# Which chains are accepted: the same under each Python.


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chains")
    for name, chain in odd_chains.all_chains().items():
        chain.write(folder / name)
    return folder


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_each_python_has_the_same_verdicts(chains: Path, version: str) -> None:
    program = interpreters.demand(version)
    done = subprocess.run(
        [program, tls_verdicts.__file__, chains],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 3,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    outer = {name: said["outer"] for name, said in found.items()}
    accepted = {*odd_chains.good(), *odd_chains.odd(), *odd_chains.anchored()}
    assert {name for name, said in outer.items() if said == ACCEPTED} == accepted
    in_mesh = {name for name, said in found.items() if said["mesh"] == ACCEPTED}
    assert in_mesh == {*odd_chains.good(), *odd_chains.odd(), odd_chains.WRONG_NAME}, (
        "a chain leads to a root, and no host name is asked for"
    )
    assert outer["expired authority"] == "certificate has expired"
    assert outer["issuer is no authority"] == "invalid CA certificate"
    assert "Hostname mismatch" in outer[odd_chains.WRONG_NAME]


def test_no_other_module_makes_a_context() -> None:
    """One that did would have the verify flags of its Python's version."""
    made = re.compile(
        r"create_default_context\(|_create_unverified_context\(|\bSSLContext\(|\bSSL\.Context\("
    )
    makers = {
        str(file.relative_to(ROOT))
        for package in ("shared", "gateway", "agent", "hbone")
        for file in (ROOT / package).rglob("*.py")
        if made.search(file.read_text())
    }
    assert makers == {"shared/net/tls/contexts.py", "shared/net/legs/tls_handshake.py"}


def test_flags_are_those_of_the_factory(credentials: Credentials) -> None:
    outer = client_context(credentials.ca, 0.0)
    assert outer.verify_flags == client_of(None, alpn="http/1.1").verify_flags == contexts.OUTER_FLAGS
    mesh = mesh_context(ssl.SSLContext, server=False)
    assert mesh.verify_flags == contexts.MESH_FLAGS
    assert (mesh.verify_mode, mesh.check_hostname) == (ssl.CERT_REQUIRED, False)
    assert (outer.verify_mode, outer.check_hostname) == (ssl.CERT_REQUIRED, True)
    for context in (outer, mesh, server_context(credentials.certificate, credentials.key)):
        assert not context.verify_flags & ssl.VerifyFlags.VERIFY_X509_STRICT
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_protocols_are_offered_as_asked_for(credentials: Credentials) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_own(server, credentials.certificate, credentials.key)
    server.set_alpn_protocols(["http/1.1", "h2"])
    for alpn in ("http/1.1", "h2"):
        end = handshake(client_context(credentials.ca, 0.0, alpn), server, "localhost")
        assert end.selected_alpn_protocol() == alpn


# Files of trusted certificates.


@pytest.fixture
def root() -> Authority:
    return Authority.create("test.local")


def test_what_no_file_of_trusted_certificates_is(tmp_path: Path, root: Authority) -> None:
    cut = root.root_pem[: len(root.root_pem) // 2]
    spoilt = root.root_pem.replace(b"\nMII", b"\nM*I", 1)
    contents = {
        "empty": b"",
        "blank": b" \n\t\n",
        "text": b"no certificate here\n",
        "key": root.issue(dns_names=["a"]).key_pem,
        "list": revocation_list(root),
        "der": ssl.PEM_cert_to_DER_cert(root.root_pem.decode()),
        "cut": cut,
        "spoilt": spoilt,
        "second spoilt": root.root_pem + spoilt,
        "long": b"#" * (MAX_PEM_BYTES + 1),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    expected = {
        "empty": "empty",
        "blank": "empty",
        "text": "no certificate in PEM",
        "key": "no certificate in PEM",
        "list": "no certificate in PEM",
        "der": "no certificate in PEM",
        "cut": "a certificate that cannot be read",
        "spoilt": "a certificate that cannot be read",
        "second spoilt": "a certificate that cannot be read",
        "long": f"it is longer than {MAX_PEM_BYTES} bytes",
        "folder": "it is a directory, not a regular file",
        "pipe": "it is a named pipe, not a regular file",
        "missing": "No such file or directory",
        "a" * 300: "File name too long",
    }
    for name, reason in expected.items():
        file = tmp_path / name
        with pytest.raises(UnavailableError) as caught:
            check_file(file)
        assert str(caught.value) == f"{file}: {reason}"
        with pytest.raises(UnavailableError) as caught:
            client_context(file, 0.0)
        assert str(caught.value) == f"trusted certificates: {file}: {reason}"


def test_what_may_stand_between_certificates(tmp_path: Path, root: Authority) -> None:
    other = Authority.create("other.local")
    file = tmp_path / "ca.pem"
    comment = "# Autorité \N{SNOWMAN}\r\n".encode() + b"\xff\n"
    file.write_bytes(comment + root.root_pem + revocation_list(root) + comment + other.root_pem)
    check_file(file)
    assert len(client_context(file, 0.0).get_ca_certs()) == 2


@pytest.mark.parametrize("pem", [b"", b"  \n", b"garbage"])
def test_no_certificates_are_not_the_system_s(pem: bytes) -> None:
    with pytest.raises(ValueError, match=r"^(empty|no certificate in PEM)$"):
        client_of(pem, alpn="http/1.1")
    with pytest.raises(ValueError, match=r"^(empty|no certificate in PEM)$"):
        trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), pem)


def test_reading_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        assert read_file(tmp_path / "empty") == b""
        for wrong in (tmp_path, tmp_path / "missing"):
            with pytest.raises(UnavailableError):
                read_file(wrong)
    assert os.listdir("/proc/self/fd") == before


def test_a_system_without_certificates_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    client_of(None, alpn="h2")
    assert "this system has no trusted certificates" in caplog.text
    caplog.clear()
    (tmp_path / "none.pem").write_bytes(Authority.create("test.local").root_pem)
    client_of(None, alpn="h2")
    assert not caplog.records


def test_a_key_log_only_where_the_user_asks_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, credentials: Credentials
) -> None:
    monkeypatch.delenv("SSLKEYLOGFILE", raising=False)
    assert client_of(None, alpn="h2").keylog_filename is None
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "keys"))
    assert client_of(None, alpn="h2").keylog_filename == str(tmp_path / "keys")
    assert mesh_context(ssl.SSLContext, server=False).keylog_filename is None
    assert server_context(credentials.certificate, credentials.key).keylog_filename is None


# Our own certificate.


def test_an_encrypted_key_is_refused_without_asking_for_its_password(
    tmp_path: Path, credentials: Credentials
) -> None:
    key = tmp_path / "locked.pem"
    key.write_bytes(locked(credentials.key.read_bytes()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with pytest.raises(ValueError, match="the key is encrypted"):
        load_own(context, credentials.certificate, key)
    with pytest.raises(ValueError, match="the key is encrypted"):
        load_own_pem(context, credentials.certificate.read_bytes() + key.read_bytes())
    with pytest.raises(UnavailableError, match=f"key {key}: the key is encrypted"):
        server_context(credentials.certificate, key)


def test_a_certificate_that_is_in_memory_only(credentials: Credentials) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_own_pem(server, credentials.certificate.read_bytes() + credentials.key.read_bytes())
    handshake(client_context(credentials.ca, 0.0), server, "localhost")

"""TLS contexts: what they offer, what they trust, and errors that name the file."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from shared.errors import UnavailableError
from shared.identity.certificates.authority import Authority
from shared.net.tls import _files, client_context, read_again, server_context
from tests.shared.net.conftest import Credentials


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, name: str = "localhost") -> ssl.SSLObject:
    """The client's end after a handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(5):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends[0]


def test_a_handshake(credentials: Credentials) -> None:
    client = client_context(credentials.ca, 0.0)
    tls = handshake(client, server_context(credentials.certificate, credentials.key))
    assert (tls.selected_alpn_protocol(), tls.version()) == ("h2", "TLSv1.3")


def test_certificates_and_names_are_checked(credentials: Credentials) -> None:
    server = server_context(credentials.certificate, credentials.key)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client_context(credentials.other_ca, 0.0), server)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(client_context(credentials.ca, 0.0), server, "other.example")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client_context(None, 0.0), server)


@pytest.mark.parametrize("old", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_nothing_older_than_tls_1_2(credentials: Credentials, old: ssl.TLSVersion) -> None:
    server = server_context(credentials.certificate, credentials.key)
    client = ssl.create_default_context(cafile=credentials.ca)
    client.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    client.maximum_version = old
    with pytest.raises(ssl.SSLError):
        handshake(client, server)
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
        handshake(old, server)
    (tmp_path / "new.pem").write_bytes(credentials.ca.read_bytes())
    (tmp_path / "new.pem").rename(ca)
    assert client_context(ca, 100.5) is old, "it is not looked at for every connection"
    handshake(client_context(ca, 102.0), server)
    ca.write_text("no certificate here")
    handshake(client_context(ca, 104.0), server)
    assert "keeping the certificate in use" in caplog.text
    ca.unlink()
    handshake(client_context(ca, 106.0), server)


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
    handshake(client_context(ca, 100.0), server_context(credentials.certificate, credentials.key))


def test_the_system_s_certificates_are_watched_too() -> None:
    assert client_context(None, 0.0).verify_mode is ssl.CERT_REQUIRED
    assert all(file.exists() for file in _files(None))


def test_trusted_certificates_that_cannot_be_read(tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing.pem", tmp_path / "empty.pem"
    empty.write_text("no certificate here\n")
    with pytest.raises(
        UnavailableError, match=f"^trusted certificates: {missing}: No such file or directory$"
    ):
        client_context(missing, 0.0)
    with pytest.raises(UnavailableError, match=f"^trusted certificates: {empty}: .*certificate"):
        client_context(empty, 0.0)
    empty.write_bytes(Authority.create("late.local").root_pem)
    client_context(empty, 0.0)  # a failure is not remembered


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

"""The throw-away CA: its certificates hold in a real TLS handshake, and its files are private and whole."""

from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from shared.identity.authority import Authority, KeyPair
from shared.identity.spiffe import SpiffeId

HELLO = SpiffeId.of_workload("demo.local", "demo", "hello")


def leaf(pair: KeyPair) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pair.certificate_pem)


def uses(certificate: x509.Certificate) -> set[x509.ObjectIdentifier]:
    return set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, server_name: str) -> ssl.SSLObject:
    """Both ends over memory, to the end of the handshake; returns the server's end."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_end = client.wrap_bio(to_client, to_server, server_hostname=server_name)
    server_end = server.wrap_bio(to_server, to_client, server_side=True)
    pending = [client_end, server_end]
    while pending:
        end = pending.pop(0)
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            pending.append(end)
    return server_end


def contexts(authority: Authority, folder: Path, server: KeyPair, client: KeyPair) -> list[ssl.SSLContext]:
    """Client and server that trust the root, check strictly and use the files as written."""
    made = []
    for name, pair, purpose in (
        ("client", client, ssl.Purpose.SERVER_AUTH),
        ("server", server, ssl.Purpose.CLIENT_AUTH),
    ):
        authority.write(folder / name, pair)
        context = ssl.create_default_context(purpose, cafile=str(folder / name / "ca_certificates.pem"))
        context.load_cert_chain(folder / name / "certificates.pem", folder / name / "private_key.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
        made.append(context)
    return made


def test_mutual_tls_with_what_was_written(tmp_path: Path) -> None:
    authority = Authority.create("demo.local")
    server = authority.issue(dns_names=["hello.example"], ip_addresses=["127.0.0.1"])
    client, accepting = contexts(authority, tmp_path, server, authority.issue(HELLO))
    seen = handshake(client, accepting, "hello.example").getpeercert()
    assert seen is not None
    assert seen["subjectAltName"] == (("URI", str(HELLO)),)
    handshake(client, accepting, "127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError, match=r"hello\.other"):
        handshake(client, accepting, "hello.other")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"server": False}, "purpose"),
        ({"lifetime_s": -60}, "expired"),
    ],
)
def test_certificates_made_to_fail(tmp_path: Path, options: dict[str, int], complaint: str) -> None:
    authority = Authority.create("demo.local")
    server = authority.issue(dns_names=["hello.example"], **options)  # type: ignore[arg-type]  # a mixed table
    client, accepting = contexts(authority, tmp_path, server, authority.issue(HELLO))
    with pytest.raises(ssl.SSLCertVerificationError, match=complaint):
        handshake(client, accepting, "hello.example")


def test_another_root_of_the_same_name_is_not_trusted(tmp_path: Path) -> None:
    authority, impostor = Authority.create("demo.local"), Authority.create("demo.local")
    client, accepting = contexts(
        authority, tmp_path, impostor.issue(dns_names=["hello.example"]), authority.issue(HELLO)
    )
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client, accepting, "hello.example")


def test_what_a_leaf_says_about_itself() -> None:
    authority = Authority.create("demo.local")
    certificate = leaf(authority.issue(HELLO))
    now = datetime.now(UTC)
    assert timedelta(minutes=4) < now - certificate.not_valid_before_utc < timedelta(minutes=6)
    assert timedelta(hours=23) < certificate.not_valid_after_utc - now <= timedelta(hours=24)
    assert uses(certificate) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert uses(leaf(authority.issue(HELLO, server=False))) == {ExtendedKeyUsageOID.CLIENT_AUTH}
    assert uses(leaf(authority.issue(HELLO, client=False))) == {ExtendedKeyUsageOID.SERVER_AUTH}


def test_no_leaf_outlives_its_root() -> None:
    authority = Authority.create("demo.local", lifetime_s=600)
    certificate = leaf(authority.issue(HELLO, lifetime_s=3600))
    assert certificate.not_valid_after_utc == authority.root.not_valid_after_utc


def test_a_root_with_the_longest_trust_domain() -> None:
    authority = Authority.create("a" * 255)
    assert x509.load_pem_x509_certificate(authority.root_pem) == authority.root


def test_nothing_to_certify() -> None:
    authority = Authority.create("demo.local")
    with pytest.raises(ValueError, match="certificate for nobody"):
        authority.issue()
    with pytest.raises(ValueError, match="certificate for nothing"):
        authority.issue(HELLO, server=False, client=False)
    with pytest.raises(ValueError, match="trust domain"):
        Authority.create("Demo Local")


def test_files_are_private_and_leave_nothing_beside_them(tmp_path: Path) -> None:
    authority = Authority.create("demo.local")
    folder = tmp_path / "run" / "credentials"
    for _ in range(2):
        pair = authority.issue(HELLO)
        authority.write(folder, pair)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    assert modes == {"certificates.pem": 0o644, "private_key.pem": 0o600, "ca_certificates.pem": 0o644}
    assert (folder / "certificates.pem").read_bytes() == pair.certificate_pem
    assert (folder / "ca_certificates.pem").read_bytes() == authority.root_pem
    key = load_pem_private_key((folder / "private_key.pem").read_bytes(), None)
    assert key.public_key() == leaf(pair).public_key()


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    authority = Authority.create("demo.local")
    (tmp_path / "private_key.pem" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError):
        authority.write(tmp_path, authority.issue(HELLO))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ca_certificates.pem", "private_key.pem"]


def test_keys_stay_out_of_repr() -> None:
    authority = Authority.create("demo.local")
    pair = authority.issue(HELLO)
    assert "PRIVATE" not in repr(pair)
    assert "rivateKey" not in repr(authority)

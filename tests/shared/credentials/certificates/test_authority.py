"""The throw-away CA: its certificates hold in a real TLS handshake, and its files are private and whole."""

from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shared.credentials.certificates.authority import Authority, KeyPair
from shared.errors import UnavailableError
from shared.private_folder import PrivateFolder
from shared.trust.spiffe import SpiffeId, ids_of
from tests.support.certificate_requests import new_key, request_pem

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


# Requests of others.


def test_a_request_is_signed_for_the_name_that_is_allowed() -> None:
    authority = Authority.create("demo.local")
    key = new_key()
    for names in ((), (x509.UniformResourceIdentifier(str(HELLO)),)):
        certificate = authority.sign(request_pem(key, *names), HELLO, lifetime_s=60)
        certificate.verify_directly_issued_by(authority.root)
        assert certificate.public_key() == key.public_key()
        assert ids_of(certificate.public_bytes(serialization.Encoding.DER)) == [HELLO]
        assert uses(certificate) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}


def test_nothing_but_key_and_name_is_taken_from_a_request() -> None:
    authority = Authority.create("demo.local")
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "admin")]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=9), critical=True)
        .sign(new_key(), hashes.SHA256())
    )
    certificate = authority.sign(request.public_bytes(serialization.Encoding.PEM), HELLO)
    assert certificate.subject == x509.Name([])
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


@pytest.mark.parametrize(
    "names",
    [
        [x509.UniformResourceIdentifier("spiffe://demo.local/ns/demo/sa/admin")],
        [x509.UniformResourceIdentifier(str(HELLO)), x509.DNSName("hello.example")],
        [x509.UniformResourceIdentifier(str(HELLO))] * 2,
        [x509.DNSName(str(HELLO))],
    ],
)
def test_a_request_for_other_names_is_refused(names: list[x509.GeneralName]) -> None:
    with pytest.raises(ValueError, match="asks for another name than spiffe:"):
        Authority.create("demo.local").sign(request_pem(new_key(), *names), HELLO)


def test_requests_that_cannot_be_signed() -> None:
    authority = Authority.create("demo.local")
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    with pytest.raises(ValueError, match="RSA key to be certified has less than 2048 bits"):
        authority.sign(request_pem(weak), HELLO)
    with pytest.raises(ValueError, match="neither RSA nor EC"):
        authority.sign(request_pem(ed25519.Ed25519PrivateKey.generate()), HELLO)
    for spoilt in (b"", b"garbage", authority.root_pem, request_pem(new_key())[:80]):
        with pytest.raises(ValueError, match=r"^certificate request cannot be read$"):
            authority.sign(spoilt, HELLO)


def test_a_request_with_a_key_that_is_somebody_elses() -> None:
    """Signed with one key, and naming another of the same size."""
    ours, theirs = new_key(), new_key()
    request = x509.load_pem_x509_csr(request_pem(ours)).public_bytes(serialization.Encoding.DER)
    point = [
        key.public_key().public_bytes(
            serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
        )
        for key in (ours, theirs)
    ]
    forged = x509.load_der_x509_csr(request.replace(point[0], point[1]))
    with pytest.raises(ValueError, match="not signed with the key that is in it"):
        Authority.create("demo.local").sign(forged.public_bytes(serialization.Encoding.PEM), HELLO)


# The authority itself in files.


def test_an_authority_comes_back_from_its_files(tmp_path: Path) -> None:
    authority = Authority.create("demo.local")
    with PrivateFolder(tmp_path) as folder:
        authority.save(folder)
        loaded = Authority.load(folder)
    assert (loaded.trust_domain, loaded.root) == (authority.trust_domain, authority.root)
    leaf(loaded.issue(HELLO)).verify_directly_issued_by(authority.root)


def test_files_that_are_no_authority(tmp_path: Path) -> None:
    authority, other = Authority.create("demo.local"), Authority.create("demo.local")
    with PrivateFolder(tmp_path) as folder:
        with pytest.raises(UnavailableError, match=r"ca-cert\.pem: No such file or directory$"):
            Authority.load(folder)
        authority.save(folder)
        (tmp_path / "ca-key.pem").unlink()
        with pytest.raises(UnavailableError, match=r"ca-key\.pem: No such file or directory$"):
            Authority.load(folder)
        other.save(folder)
        (tmp_path / "ca-cert.pem").write_bytes(authority.root_pem)
        with pytest.raises(UnavailableError, match=r"ca-key\.pem is not the key of .*ca-cert\.pem$"):
            Authority.load(folder)
        (tmp_path / "ca-cert.pem").write_bytes(authority.issue(dns_names=["a"]).certificate_pem)
        with pytest.raises(UnavailableError, match=r"ca-cert\.pem is no certificate of ours$"):
            Authority.load(folder)

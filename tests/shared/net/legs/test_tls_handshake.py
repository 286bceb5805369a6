"""The server's context and its handshakes against OpenSSL clients, in memory: no sockets, no event loop."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from OpenSSL import SSL, crypto

from shared.credentials.certificates.authority import Authority, KeyPair
from shared.errors import (
    ALERT_DECODE_ERROR,
    ClientHelloError,
    ConfigError,
    DeniedError,
    TlsFailureError,
    UnavailableError,
)
from shared.net.legs.tls_handshake import ServerHandshake, outgoing
from shared.net.tls.certificate_folder import CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE
from shared.tls import alerts
from tests.shared.net.legs.mesh_server import CLIENT, SERVER, TRUST_DOMAIN, context_of, each_version, nobody
from tests.support import odd_chains
from tests.support.locked_key import locked
from tests.support.tls_client import client_context, reason

HALF_A_HELLO = b"\x16\x03\x01\x02\x00\x01"
MALFORMED_HELLO = b"\x16\x03\x01\x00\x06\x01\x00\x00\x02\x03\x03"


@pytest.fixture
def server(files: Path) -> ServerHandshake:
    return ServerHandshake(context_of(files))


def client_of(context: SSL.Context) -> SSL.Connection:
    client = SSL.Connection(context, None)
    client.set_connect_state()
    return client


def shake(client: SSL.Connection, server: ServerHandshake) -> None:
    """Carries bytes both ways until the server's handshake is complete; raises what `receive_data` raises."""
    complete = False
    while not complete:
        with suppress(SSL.Error):  # it waits for more, or gives up with an alert
            client.do_handshake()
        complete = server.receive_data(outgoing(client))
        if not complete:
            client.bio_write(server.data_to_send())


def told(client: SSL.Connection, last: bytes) -> str:
    """What the client makes of the last bytes from the server."""
    client.bio_write(last)
    with pytest.raises(SSL.Error) as caught:
        client.do_handshake()  # in TLS 1.3 complete long since
        client.recv(1)
    return reason(caught.value)


def failure(client: SSL.Connection, server: ServerHandshake) -> TlsFailureError:
    """How the handshake of the two fails."""
    with pytest.raises(TlsFailureError) as caught:
        shake(client, server)
    assert caught.value.flag == "TLS_FAILURE"
    return caught.value


# Who comes in.


@each_version
def test_the_rule_sees_the_certificate_that_the_client_showed(
    files: Path, authority: Authority, certificate: KeyPair, version: int
) -> None:
    seen: list[list[bytes]] = []
    server = ServerHandshake(context_of(files, seen.append))
    shake(client_of(client_context(authority, certificate, version=version)), server)
    der = server.certificate()
    assert seen == [server.proved_chain()] == [[der, authority.root.public_bytes(serialization.Encoding.DER)]]
    shown = x509.load_der_x509_certificate(der).public_bytes(serialization.Encoding.PEM)
    assert shown == certificate.certificate_pem


@each_version
def test_what_is_written_last_completes_the_client_s_handshake(
    server: ServerHandshake, authority: Authority, certificate: KeyPair, version: int
) -> None:
    client = client_of(client_context(authority, certificate, version=version))
    shake(client, server)
    server.tls.sendall(b"welcome")
    client.bio_write(outgoing(server.tls))
    client.do_handshake()
    assert client.recv(100) == b"welcome"


@each_version
def test_a_certificate_of_another_authority(
    server: ServerHandshake, authority: Authority, version: int
) -> None:
    stranger = Authority.create(TRUST_DOMAIN).issue(CLIENT)
    client = client_of(client_context(authority, stranger, version=version))
    error = failure(client, server)
    assert "client certificate refused: unable to get issuer cert locally" in str(error)
    assert "unknown ca" in told(client, server.alert_to_send(error))


@each_version
def test_an_expired_certificate(files: Path, authority: Authority, version: int) -> None:
    seen: list[list[bytes]] = []
    server = ServerHandshake(context_of(files, seen.append))
    old = authority.issue(CLIENT, lifetime_s=-60)
    client = client_of(client_context(authority, old, version=version))
    error = failure(client, server)
    assert str(error) == "tls handshake: client certificate refused: cert has expired (depth 0)"
    assert "certificate expired" in told(client, server.alert_to_send(error))
    assert seen == [], "the rule is not asked about a chain that OpenSSL refuses"


def test_a_certificate_for_servers_only(server: ServerHandshake, authority: Authority) -> None:
    client = client_of(client_context(authority, authority.issue(CLIENT, client=False)))
    error = failure(client, server)
    assert "client certificate refused: invalid purpose" in str(error)
    assert "alert" in told(client, server.alert_to_send(error))


@each_version
def test_a_context_that_forgot_to_ask_for_certificates_lets_nobody_in(
    files: Path, authority: Authority, version: int
) -> None:
    context = context_of(files)
    context.set_verify(SSL.VERIFY_NONE)
    server = ServerHandshake(context)
    shake(client_of(client_context(authority, None, version=version)), server)
    with pytest.raises(TlsFailureError, match="no client certificate"):
        server.certificate()


@each_version
def test_who_is_denied_by_the_rule_fails_its_handshake(
    files: Path, authority: Authority, certificate: KeyPair, version: int, capfd: pytest.CaptureFixture[str]
) -> None:
    context = context_of(files, nobody)
    for _ in range(2):
        server = ServerHandshake(context)
        client = client_of(client_context(authority, certificate, version=version))
        with pytest.raises(DeniedError, match="peer denied: no rule allows it") as caught:
            shake(client, server)
        assert "alert internal error" in told(client, server.alert_to_send(caught.value))
        with pytest.raises(TlsFailureError):
            server.certificate()
    assert capfd.readouterr().err == ""  # where a callback's traceback would go


# Handshakes that do not come to an end.


@pytest.mark.parametrize(
    "first_bytes",
    [b"GET / HTTP/1.1\r\nhost: hello\r\n\r\n", bytes(100), b"\xff" * 100, b"SSH-2.0-OpenSSH_9.6\r\n"],
)
def test_what_is_no_tls(server: ServerHandshake, first_bytes: bytes) -> None:
    with pytest.raises(ClientHelloError) as caught:
        server.receive_data(first_bytes)
    last = server.alert_to_send(caught.value)
    assert last[:3] == alerts.fatal(0)[:3]
    assert len(last) == len(alerts.fatal(0))


def test_a_malformed_hello(server: ServerHandshake) -> None:
    with pytest.raises(TlsFailureError) as caught:
        server.receive_data(MALFORMED_HELLO)
    assert server.alert_to_send(caught.value)[0] == alerts.CONTENT_ALERT


def test_tls_1_1(server: ServerHandshake, authority: Authority, certificate: KeyPair) -> None:
    context = client_context(authority, certificate, version=SSL.TLS1_1_VERSION)
    context.set_cipher_list(b"ALL:@SECLEVEL=0")
    client = client_of(context)
    assert "protocol version" in told(client, server.alert_to_send(failure(client, server)))


def test_a_cipher_without_forward_secrecy(
    server: ServerHandshake, authority: Authority, certificate: KeyPair
) -> None:
    context = client_context(authority, certificate, version=SSL.TLS1_2_VERSION)
    context.set_cipher_list(b"AES128-GCM-SHA256")
    client = client_of(context)
    error = failure(client, server)
    assert "no shared cipher" in str(error)
    assert "handshake failure" in told(client, server.alert_to_send(error))


def test_a_client_that_has_heard_nothing_is_told_in_plain(server: ServerHandshake) -> None:
    assert not server.receive_data(HALF_A_HELLO)
    assert server.data_to_send() == b""
    late = TlsFailureError("tls handshake: not complete within 10 s")
    assert server.alert_to_send(late) == alerts.fatal(ALERT_DECODE_ERROR)


@each_version
def test_a_client_that_has_heard_something_is_not_told_in_plain(
    server: ServerHandshake, authority: Authority, version: int
) -> None:
    client = client_of(client_context(authority, None, version=version))
    with pytest.raises(SSL.WantReadError):
        client.do_handshake()
    assert not server.receive_data(outgoing(client))
    assert server.data_to_send()
    assert server.alert_to_send(TlsFailureError("tls handshake: not complete within 10 s")) == b""


# What is agreed.


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        ((b"istio-peer-exchange", b"istio"), b"istio"),
        ((b"istio-http/1.1", b"istio", b"http/1.1"), b"istio"),
        ((b"istio-h2", b"istio", b"h2"), b"istio"),
        ((b"istio-http/1.1", b"http/1.1"), b"istio-http/1.1"),
        ((b"h2", b"http/1.1"), b"http/1.1"),
        ((b"h2",), b"h2"),
        ((b"istio-h2", b"istio-peer-exchange", b"http/1.0"), b""),
        ((), b""),
    ],
)
def test_alpn(
    server: ServerHandshake,
    authority: Authority,
    certificate: KeyPair,
    offered: tuple[bytes, ...],
    chosen: bytes,
) -> None:
    client = client_of(client_context(authority, certificate, alpn=offered))
    shake(client, server)
    assert client.get_alpn_proto_negotiated() == server.tls.get_alpn_proto_negotiated() == chosen


@each_version
def test_no_session_is_resumed(files: Path, authority: Authority, certificate: KeyPair, version: int) -> None:
    checked: list[int] = []

    def check(tls: SSL.Connection, shown: object, error: int, depth: int, ok: int) -> bool:
        checked.append(depth)
        return bool(ok)

    server_side = context_of(files)
    server_side.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, check)
    client_side = client_context(authority, certificate, version=version)
    client_side.set_session_cache_mode(SSL.SESS_CACHE_CLIENT)
    first, server = client_of(client_side), ServerHandshake(server_side)
    shake(first, server)
    server.tls.sendall(b"after the tickets, if there are any")
    first.bio_write(outgoing(server.tls))
    first.do_handshake()
    assert first.recv(100)
    session = first.get_session()
    assert session is not None
    assert checked == [1, 0]  # the root, the certificate

    second = client_of(client_side)
    second.set_session(session)
    shake(second, ServerHandshake(server_side))
    assert checked == [1, 0] * 2  # a resumed session checks nothing


# Which chains: as the factory's contexts of the mesh.


def test_chains_are_judged_as_by_others_of_the_mesh(files: Path) -> None:
    accepted = set()
    chains = odd_chains.all_chains()
    for name, chain in chains.items():
        (files / ROOTS_FILE).write_bytes(chain.trusted)
        context = context_of(files)  # who owns the store, so it has to outlive it
        store = context.get_cert_store()
        assert store is not None
        shown = re.findall(rb"-----BEGIN.*?-----END CERTIFICATE-----", chain.shown, re.DOTALL)
        leaf, *others = (crypto.load_certificate(crypto.FILETYPE_PEM, pem) for pem in shown)
        with suppress(crypto.X509StoreContextError):
            crypto.X509StoreContext(store, leaf, others).verify_certificate()
            accepted.add(name)
    # What a certificate is for, and its names, are not the store's matter.
    elsewhere = {"for clients", odd_chains.WRONG_NAME}
    assert accepted == {*odd_chains.good(), *odd_chains.odd(), *elsewhere}


# Files.


def test_a_missing_file_is_named(files: Path) -> None:
    (files / ROOTS_FILE).unlink()
    with pytest.raises(UnavailableError, match=r"root certificates: .*ca_certificates.pem: No such file"):
        context_of(files)


@pytest.mark.parametrize("name", [CERTIFICATES_FILE, PRIVATE_KEY_FILE, ROOTS_FILE])
@pytest.mark.parametrize("content", [b"", b"no PEM", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_a_file_without_what_it_should_have_is_named(files: Path, name: str, content: bytes) -> None:
    (files / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        context_of(files)
    assert caught.value.file == str(files / name)


def test_the_key_of_another_certificate_is_refused(files: Path, authority: Authority) -> None:
    (files / PRIVATE_KEY_FILE).write_bytes(authority.issue(SERVER).key_pem)
    with pytest.raises(ConfigError, match=r"no usable private key of the certificate: .*mismatch"):
        context_of(files)


def test_an_encrypted_key_is_refused_without_asking(files: Path) -> None:
    key = files / PRIVATE_KEY_FILE
    key.write_bytes(locked(key.read_bytes()))
    with pytest.raises(ConfigError, match="the private key is encrypted"):
        context_of(files)

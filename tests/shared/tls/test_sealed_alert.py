"""The sealed alert against the RFC's own numbers, and against OpenSSL as the client that opens it."""

from __future__ import annotations

from contextlib import suppress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from OpenSSL import SSL

from shared.credentials.certificates.authority import Authority
from shared.errors import ALERT_ACCESS_DENIED, ALERT_INTERNAL_ERROR, ALERT_UNRECOGNIZED_NAME
from shared.tls.sealed_alert import SUITES, sealed_alert
from shared.trust.spiffe import SpiffeId
from tests.support.tls_client import client_context, reason

TRUST_DOMAIN = "demo.local"
HEADER_BYTES = 5
BIO_BYTES = 1 << 16  # more than a handshake writes

# RFC 8448 section 3, "derive write traffic keys for application data" of the server.
SECRET = bytes.fromhex("a11af9f05531f856ad47116b45a950328204b4f44bfb6b3a4b4f1f3fcb631643")
KEY = bytes.fromhex("9f02283b6c9c07efc26bb9f2ac92e356")
IV = bytes.fromhex("cf782b88dd83549aadf1e984")


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create(TRUST_DOMAIN)


def server_of(authority: Authority, secrets: dict[str, bytes]) -> SSL.Connection:
    """A TLS server that leaves its traffic secrets in `secrets`."""
    pair = authority.issue(SpiffeId(TRUST_DOMAIN, "/ns/demo/sa/hello"))
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    context.use_certificate(x509.load_pem_x509_certificate(pair.certificate_pem))
    context.use_privatekey(load_pem_private_key(pair.key_pem, None))  # type: ignore[arg-type]  # an EC key

    def note(tls: SSL.Connection, line: bytes) -> None:
        name, _, secret = line.decode().split()
        secrets[name] = bytes.fromhex(secret)

    context.set_keylog_callback(note)
    server = SSL.Connection(context, None)
    server.set_accept_state()
    return server


def step(peer: SSL.Connection, received: bytes) -> bytes:
    """One step of a handshake: what `peer` answers to `received`."""
    if received:
        peer.bio_write(received)
    with suppress(SSL.WantReadError):
        peer.do_handshake()
    return peer.bio_read(BIO_BYTES)


def test_the_numbers_of_the_rfc() -> None:
    record = sealed_alert(ALERT_ACCESS_DENIED, "TLS_AES_128_GCM_SHA256", SECRET)
    header, sealed = record[:HEADER_BYTES], record[HEADER_BYTES:]
    assert header == bytes.fromhex("17 0303 0013")  # application data, TLS 1.2, 2 bytes + type + tag
    assert AESGCM(KEY).decrypt(IV, sealed, header) == bytes.fromhex("02 31 15")  # fatal, description, alert


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize(
    ("description", "name"),
    [
        (ALERT_ACCESS_DENIED, "access denied"),
        (ALERT_INTERNAL_ERROR, "internal error"),
        (ALERT_UNRECOGNIZED_NAME, "unrecognized name"),
    ],
)
def test_a_client_with_keys_understands_it(
    authority: Authority, suite: str, description: int, name: str
) -> None:
    secrets: dict[str, bytes] = {}
    server = server_of(authority, secrets)
    client = SSL.Connection(client_context(authority, None, suites=suite), None)
    client.set_connect_state()
    step(server, step(client, step(server, step(client, b""))))  # the last, session tickets, never arrives
    client.bio_write(sealed_alert(description, suite, secrets["SERVER_TRAFFIC_SECRET_0"]))
    with pytest.raises(SSL.Error) as caught:
        client.recv(1)
    assert name in reason(caught.value)


def test_another_suite_is_refused_without_a_word_about_the_secret() -> None:
    with pytest.raises(ValueError, match="cipher suite TLS_AES_128_CCM_SHA256: not one of") as caught:
        sealed_alert(ALERT_ACCESS_DENIED, "TLS_AES_128_CCM_SHA256", SECRET)
    assert SECRET.hex() not in str(caught.value)


@pytest.mark.parametrize("description", [-1, 256])
def test_a_description_is_one_byte(description: int) -> None:
    with pytest.raises(ValueError, match=r"not in 0\.\.255"):
        sealed_alert(description, SUITES[0], SECRET)

"""SPIFFE IDs: the standard's rules, certificates made to break them, and random names."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import example, given
from hypothesis import strategies as st

from shared.credentials.certificates.authority import Authority
from shared.errors import DeniedError
from shared.trust.spiffe import (
    MAX_URI_BYTES,
    SpiffeId,
    ids_of,
    peer_id,
)

HELLO = "spiffe://demo.local/ns/demo/sa/hello"

names = st.text("abcXYZ019._-", min_size=1, max_size=6).filter(lambda name: name not in (".", ".."))
trust_domains = st.text("abc019._-", min_size=1, max_size=8)
paths = st.lists(names, max_size=6).map(lambda segments: "".join(f"/{segment}" for segment in segments))
identities = st.builds(SpiffeId, trust_domains, paths)


# Reading.


def test_a_workload_of_istio() -> None:
    identity = SpiffeId.parse(HELLO)
    assert (identity.trust_domain, identity.path) == ("demo.local", "/ns/demo/sa/hello")
    assert (identity.namespace, identity.service_account) == ("demo", "hello")
    assert str(identity) == HELLO
    assert identity == SpiffeId.of_workload("demo.local", "demo", "hello")


@pytest.mark.parametrize("path", ["", "/ns/demo", "/ns/demo/sa/hello/x", "/sa/hello/ns/demo", "/x/ns/a/sa/b"])
def test_other_paths_name_no_service_account(path: str) -> None:
    identity = SpiffeId("demo.local", path)
    assert (identity.namespace, identity.service_account) == (None, None)


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("", "does not start with spiffe://"),
        ("https://demo.local/ns/a", "does not start with spiffe://"),
        ("SPIFFE://demo.local/ns/a", "does not start with spiffe://"),
        ("spiffe:/demo.local/ns/a", "does not start with spiffe://"),
        ("spiffe://", "trust domain is empty"),
        ("spiffe:///ns/a", "trust domain is empty"),
        ("spiffe://Demo.local/a", "trust domain may have only"),
        ("spiffe://demo.local:443/a", "trust domain may have only"),
        ("spiffe://me@demo.local/a", "trust domain may have only"),
        ("spiffe://demo.local?x", "trust domain may have only"),
        ("spiffe://dëmo.local/a", "trust domain may have only"),
        ("spiffe://" + "a" * 256 + "/a", "longer than 255 bytes"),
        ("spiffe://demo.local/", "segment is empty"),
        ("spiffe://demo.local/a/", "segment is empty"),
        ("spiffe://demo.local//a", "segment is empty"),
        ("spiffe://demo.local/a/./b", "segment is . or .."),
        ("spiffe://demo.local/../b", "segment is . or .."),
        ("spiffe://demo.local/a?b", "segment may have only"),
        ("spiffe://demo.local/a#b", "segment may have only"),
        ("spiffe://demo.local/a%20b", "segment may have only"),
        ("spiffe://demo.local/a\n", "segment may have only"),
        ("spiffe://demo.local/ä", "segment may have only"),
        ("spiffe://demo.local/" + "a" * MAX_URI_BYTES, "longer than 2048 bytes"),
    ],
)
def test_refused_with_the_reason(uri: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        SpiffeId.parse(uri)
    assert len(str(caught.value)) < 400


def test_the_longest_one() -> None:
    stem = "spiffe://demo.local/"
    longest = stem + "a" * (MAX_URI_BYTES - len(stem))
    assert str(SpiffeId.parse(longest)) == longest
    with pytest.raises(ValueError, match="longer than 2048"):
        SpiffeId("demo.local", longest.removeprefix("spiffe://demo.local") + "a")


def test_parts_that_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match="does not start with /"):
        SpiffeId("demo.local", "ns/a")


@given(identities)
def test_every_identity_survives_its_text(identity: SpiffeId) -> None:
    assert SpiffeId.parse(str(identity)) == identity


@given(st.text(max_size=40) | st.text("spife:/.%?#@ab", max_size=40).map(lambda rest: f"spiffe://{rest}"))
@example("spiffe://a/..")
def test_any_text_is_an_identity_or_a_value_error(text: str) -> None:
    try:
        identity = SpiffeId.parse(text)
    except ValueError:
        return
    assert str(identity) == text
    assert "//" not in identity.path
    assert not {".", ".."} & set(identity.path.split("/"))


# Certificates.


def certificate(
    *names: x509.GeneralName, ca: bool = False, signs: bool = False, extensions: bool = True
) -> bytes:
    """A self-signed certificate with whatever a careless authority might put into one."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(hours=1))
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
    if extensions:
        usage = x509.KeyUsage(True, False, False, False, False, signs, False, False, False)
        builder = builder.add_extension(x509.BasicConstraints(ca, None), critical=True)
        builder = builder.add_extension(usage, critical=True)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def uri(text: str) -> x509.GeneralName:
    return x509.UniformResourceIdentifier(text)


def test_the_identity_of_an_issued_certificate() -> None:
    pair = Authority.create("demo.local").issue(SpiffeId.parse(HELLO), dns_names=["hello.demo.svc"])
    der = x509.load_pem_x509_certificate(pair.certificate_pem).public_bytes(Encoding.DER)
    assert str(peer_id(der)) == HELLO
    assert ids_of(der) == [SpiffeId.parse(HELLO)]


def test_a_certificate_without_constraints_is_a_leaf() -> None:
    assert str(peer_id(certificate(uri(HELLO), extensions=False))) == HELLO


@pytest.mark.parametrize(
    ("der", "reason"),
    [
        (certificate(), "0 URI names instead of one"),
        (certificate(extensions=False), "0 URI names instead of one"),
        (certificate(x509.DNSName("hello")), "0 URI names instead of one"),
        (certificate(uri(HELLO), uri(HELLO)), "2 URI names instead of one"),
        (certificate(uri(HELLO), uri("https://example.com")), "2 URI names instead of one"),
        (certificate(uri("https://example.com/ns/a")), "does not start with spiffe://"),
        (certificate(uri("spiffe://demo.local/a//b")), "segment is empty"),
        (certificate(uri("spiffe://demo.local")), "names a trust domain, not a workload"),
        (certificate(uri(HELLO), ca=True), "signs certificates"),
        (certificate(uri(HELLO), signs=True), "signs certificates"),
        (b"", "peer certificate denied"),
        (b"\x30\x03\x02\x01\x01", "peer certificate denied"),
    ],
)
def test_certificates_that_prove_no_workload(der: bytes, reason: str) -> None:
    with pytest.raises(DeniedError, match=re.escape(reason)):
        peer_id(der)


def test_a_root_is_no_peer() -> None:
    root = Authority.create("demo.local").root.public_bytes(Encoding.DER)
    assert ids_of(root) == [SpiffeId("demo.local", "")]
    with pytest.raises(DeniedError, match="signs certificates"):
        peer_id(root)


def test_all_identities_for_showing() -> None:
    other = "spiffe://demo.local/ns/demo/sa/other"
    der = certificate(uri(HELLO), uri("https://example.com"), x509.DNSName("x"), uri(other))
    assert [str(identity) for identity in ids_of(der)] == [HELLO, other]
    assert ids_of(certificate()) == []
    with pytest.raises(ValueError, match="segment is empty"):
        ids_of(certificate(uri("spiffe://demo.local/a/")))


def test_every_prefix_of_a_certificate_is_denied() -> None:
    der = certificate(uri(HELLO))
    for length in range(len(der)):
        with pytest.raises(DeniedError):
            peer_id(der[:length])

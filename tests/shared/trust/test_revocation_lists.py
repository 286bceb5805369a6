"""Files of revocation lists, and what is none; who has signed a list."""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ObjectIdentifier
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.credentials.certificates.authority import Authority
from shared.errors import RevokedError
from shared.trust.revocation_lists import (
    MAX_FILE_BYTES,
    MAX_LISTS,
    RevocationList,
    parse,
)
from shared.trust.revocations import Revocations
from shared.trust.spiffe import SpiffeId
from tests.support.revocation import revocation_list

HELLO = SpiffeId("demo.local", "/ns/demo/sa/hello")
DEMO = Authority.create("demo.local")
OTHER = Authority.create("demo.local")  # of the same name, with another key
LEAF = DEMO.issue(HELLO)
DER = Encoding.DER


@pytest.mark.parametrize("encoding", [Encoding.PEM, Encoding.DER], ids=["pem", "der"])
def test_one_list_and_several(encoding: Encoding) -> None:
    one = revocation_list(DEMO, 7, encoding=encoding)
    assert [found.serials for found in parse(one)] == [{7}]
    assert [found.serials for found in parse(one + revocation_list(OTHER, 8, 9, encoding=encoding))] == [
        {7},
        {8, 9},
    ]


def test_words_around_a_pem_block_are_nobody_s_business() -> None:
    assert len(parse(b"# of today\n" + revocation_list(DEMO) + b"\n\n")) == 1


UNKNOWN = x509.UnrecognizedExtension(ObjectIdentifier("1.2.3.4"), b"\x05\x00")


def distribution(*, indirect: bool) -> x509.IssuingDistributionPoint:
    return x509.IssuingDistributionPoint(
        full_name=None,
        relative_name=None,
        only_contains_user_certs=not indirect,
        only_contains_ca_certs=False,
        only_some_reasons=None,
        indirect_crl=indirect,
        only_contains_attribute_certs=False,
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds no certificate revocation list"),
        (b"hello", "is neither PEM nor DER"),
        (b"\x30", "is neither PEM nor DER"),
        (b"\x30\x80", "is neither PEM nor DER"),
        (b"\x30\x85" + bytes(9), "is neither PEM nor DER"),
        (b"\x30\x82\xff\xff", "is cut off"),
        (b"\x30\x00", "error parsing asn1 value"),
        (DEMO.root_pem, "holds a CERTIFICATE, which is no certificate revocation list"),
        (LEAF.key_pem, "holds a PRIVATE KEY"),
        (revocation_list(DEMO)[:-20], "a PEM block is cut off"),
        (revocation_list(DEMO).replace(b"A", b"!"), "base64"),
        (revocation_list(DEMO, encoding=DER)[:-1], "is cut off"),
        (b"x" * (MAX_FILE_BYTES + 1), "over 8388608 bytes"),
        (b"\x30\x00" * (MAX_LISTS + 2), "more than 256"),
        (revocation_list(DEMO, extensions=[(x509.DeltaCRLIndicator(1), True)]), "a delta list"),
        (revocation_list(DEMO, extensions=[(distribution(indirect=True), True)]), "an indirect list"),
        (
            revocation_list(DEMO, extensions=[(UNKNOWN, True)]),
            "critical extension that is not known: 1.2.3.4",
        ),
        (
            revocation_list(DEMO, 7, entry_extensions=[(UNKNOWN, True)]),
            "an entry has a critical extension that is not known",
        ),
    ],
)
def test_files_that_are_none(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        parse(content)
    assert len(str(caught.value)) < 300 and "KEY-----" not in str(caught.value)


def test_extensions_that_change_nothing() -> None:
    content = revocation_list(
        DEMO,
        7,
        extensions=[(x509.CRLNumber(3), False), (UNKNOWN, False), (distribution(indirect=False), True)],
        entry_extensions=[(x509.CRLReason(x509.ReasonFlags.certificate_hold), False)],
    )
    assert parse(content)[0].serials == {7}


def of_key(key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey) -> x509.Certificate:
    """A certificate with the name of the others."""
    now, name = datetime.now(UTC), DEMO.root.subject
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    return builder.sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256())


def test_another_kind_of_key_has_signed_nothing() -> None:
    one = parse(revocation_list(DEMO))[0]
    assert one.signed_by(DEMO.root)
    assert not one.signed_by(OTHER.root)
    assert not one.signed_by(of_key(ed25519.Ed25519PrivateKey.generate()))
    assert not one.signed_by(of_key(rsa.generate_private_key(65537, 2048)))


def test_a_signature_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = parse(revocation_list(DEMO))[0], parse(revocation_list(OTHER))[0]
    assert (one.signed_by(DEMO.root), two.signed_by(DEMO.root)) == (True, False)
    monkeypatch.delattr(RevocationList, "_is_signed_by")
    assert (one.signed_by(DEMO.root), two.signed_by(DEMO.root)) == (True, False)


GOOD = revocation_list(DEMO, 1, 2, 3, extensions=[(x509.CRLNumber(3), False)], encoding=DER)


def read(content: bytes) -> tuple[RevocationList, ...]:
    with contextlib.suppress(ValueError):
        return parse(content)
    return ()


def test_every_prefix_is_refused() -> None:
    for length in range(len(GOOD)):
        assert read(GOOD[:length]) == ()


@settings(max_examples=300)
@example(at=31, piece=b"\x06")  # the issuer's common name becomes a country's, of which cryptography warns
@given(st.integers(0, len(GOOD) - 1), st.binary(max_size=4))
def test_garbage_is_refused_or_not_signed(at: int, piece: bytes) -> None:
    """Whatever has been changed: an error that is ours, or a list that the root has not signed."""
    content = GOOD[:at] + piece + GOOD[at + len(piece) :]
    leaf = x509.load_pem_x509_certificate(LEAF.certificate_pem)
    asked = Revocations()
    for one in read(content):
        if content != GOOD:
            assert not one.signed_by(DEMO.root)
        with contextlib.suppress(ValueError):
            asked.use([one], [DEMO.root])
    with contextlib.suppress(RevokedError):
        asked.check([leaf.public_bytes(DER), DEMO.root.public_bytes(DER)])


@given(
    st.binary(max_size=200)
    | st.builds(lambda body: b"-----BEGIN X509 CRL-----" + body, st.binary(max_size=80))
)
@example(b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----")
def test_any_bytes(content: bytes) -> None:
    read(content)

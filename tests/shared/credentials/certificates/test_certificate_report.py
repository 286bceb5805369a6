"""What is told of certificates."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519

from shared.credentials.certificates.authority import Authority
from shared.credentials.certificates.certificate_report import (
    describe,
    describe_all,
    describe_root,
    duration,
    until,
)
from shared.trust.spiffe import SpiffeId

HELLO = SpiffeId.of_workload("demo.local", "demo", "hello")
MESH = Authority.create("demo.local")
LEAF = x509.load_pem_x509_certificate(MESH.issue(HELLO).certificate_pem)


def test_a_certificate() -> None:
    now = LEAF.not_valid_after_utc - timedelta(hours=1)
    assert describe(LEAF, now) == {
        "identity": str(HELLO),
        "serial": f"{LEAF.serial_number:x}",
        "subject": "",
        "issuer": "CN=throw-away CA of demo.local",
        "not_before": LEAF.not_valid_before_utc.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "not_after": LEAF.not_valid_after_utc.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "remaining_s": 3600,
        "key": "EC secp256r1",
    }


def test_a_root() -> None:
    shown = describe_root(MESH.root, MESH.root.not_valid_after_utc + timedelta(seconds=5))
    assert shown["subject"] == "CN=throw-away CA of demo.local"
    assert (shown["trust_domain"], shown["remaining_s"]) == ("demo.local", -5)


def test_a_chain_and_its_roots_are_json() -> None:
    shown = json.loads(json.dumps(describe_all([LEAF], [MESH.root], datetime.now(UTC))))
    assert [list(map(len, shown.values()))] == [[1, 1]]


def test_names_of_others_are_made_harmless() -> None:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a\x1b[2Jb")])
    key = ed25519.Ed25519PrivateKey.generate()
    now = datetime.now(UTC)
    odd = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier("spiffe://UPPER/x")]), critical=False
        )
        .sign(key, None)
    )
    shown = describe(odd, now)
    assert "\x1b" not in json.dumps(shown, ensure_ascii=False)
    assert (shown["key"], shown["identity"]) == ("other", "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1 min 0 s"),
        (3599, "59 min 59 s"),
        (86399, "23 h 59 min"),
        (86400 * 10 + 3600, "10 d 1 h"),
        (-61, "1 min 1 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_until() -> None:
    assert until(61) == "1 min 1 s left"
    assert until(-61) == "expired 1 min 1 s ago"

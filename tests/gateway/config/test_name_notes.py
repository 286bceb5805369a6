"""Patterns of names in rules that take, or deny, fewer names than they seem to."""

from __future__ import annotations

import pytest

from gateway.config.config import parse

NARROW = "matches no name of the form SERVICE.NAMESPACE.svc[.DOMAIN], for * is one label: did you mean {}?"
DENIES = "* is one label, so longer names are not denied: did you mean {}?"


@pytest.mark.parametrize(
    ("pattern", "deny", "told"),
    [
        ("*.svc.cluster.local:8080", False, NARROW.format("**.svc.cluster.local")),
        ("*.demo.svc.cluster.local:8080", False, None),
        ("**.svc.cluster.local:8080", False, None),
        ("*:*", False, None),
        ("*:*", True, None),
        ("10.0.0.0/8:443", True, None),
        ("[2001:db8::/32]:443", True, None),
        ("db.prod.svc.cluster.local:*", True, None),
        ("*.prod.svc.cluster.local:*", True, DENIES.format("**.prod.svc.cluster.local")),
        ("**.prod.svc.cluster.local:*", True, None),
        ("db-*.prod.svc.cluster.local:*", True, None),
    ],
)
def test_a_rule_of_hbone(pattern: str, deny: bool, told: str | None) -> None:
    rule = f"{{from: ['*'], to: ['{pattern}'], deny: {str(deny).lower()}}}"
    text = f"routes: []\nhbone:\n  certificates: c\n  rules:\n  - {rule}"
    expected = (f"F:5: hbone.rules[0].to[0]: {told}",) if told else ()
    assert parse(text, "F").warnings == expected


@pytest.mark.parametrize(
    ("pattern", "deny", "told"),
    [
        ("{service_account}.{namespace}.svc", False, None),
        ("*.svc", False, NARROW.format("**.svc")),
        ("*.{namespace}.svc", True, DENIES.format("**.{namespace}.svc")),
    ],
)
def test_a_rule_of_registration(pattern: str, deny: bool, told: str | None) -> None:
    rule = f"{{from: ['*'], names: ['{pattern}'], deny: {str(deny).lower()}}}"
    text = f"routes: []\nreverse:\n  certificates: c\n  rules:\n  - {rule}"
    expected = (f"F:5: reverse.rules[0].names[0]: {told}",) if told else ()
    assert parse(text, "F").warnings == expected

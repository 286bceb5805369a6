"""HOST:PORT patterns of egress."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.target_pattern import TargetPattern
from shared.address import Address


@pytest.mark.parametrize(
    ("pattern", "target", "matches"),
    [
        ("db.prod.svc:5432", Address("db.prod.svc", 5432), True),
        ("DB.prod.svc:5432", Address("db.prod.svc.", 5432), True),
        ("db.prod.svc:5432", Address("db.prod.svc", 5433), False),
        ("*.prod.svc:*", Address("db.prod.svc", 1), True),
        ("*.prod.svc:*", Address("a.db.prod.svc", 1), False),
        ("**.svc:*", Address("a.db.prod.svc", 1), True),
        ("**:*", Address("10.0.0.1", 1), False),
        ("*:80", Address("10.0.0.1", 80), True),
        ("*:80", Address("a", 80), True),
        ("10.0.0.0/8:*", Address("10.1.2.3", 80), True),
        ("10.0.0.0/8:*", Address("::ffff:10.1.2.3", 80), True),
        ("10.0.0.0/8:*", Address("11.1.2.3", 80), False),
        ("10.0.0.0/8:*", Address("a.b", 80), False),
        ("10.0.0.1:80", Address("10.0.0.1", 80), True),
        ("[2001:db8::/32]:80", Address("2001:db8::1", 80), True),
        ("[2001:db8::/32]:80", Address("10.0.0.1", 80), False),
    ],
)
def test_patterns(pattern: str, target: Address, matches: bool) -> None:
    assert TargetPattern.parse(pattern).matches(target) is matches


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("db", "must be HOST:PORT"),
        (":80", "must be HOST:PORT"),
        ("db:", "the port must be"),
        ("db:0", "the port must be"),
        ("db:65536", "the port must be"),
        ("db:8*", "the port must be"),
        ("10.*:80", "addresses are written as"),
        ("10.0.0.1/8:80", "no network such as"),
        ("2001:db8::1:80", "needs brackets"),
        ("[10.0.0.1]:80", "brackets are for IPv6"),
        ("[x]:80", "is no address"),
        ("a..b:80", "empty label"),
        ("a?:80", "a host has only"),
    ],
)
def test_patterns_that_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TargetPattern.parse(pattern)


@given(st.text("ab.*:0189[]/", max_size=20))
def test_any_text_is_a_pattern_or_is_refused(text: str) -> None:
    try:
        pattern = TargetPattern.parse(text)
    except ValueError:
        return
    pattern.matches(Address("a.b", 80))
    assert str(pattern) == text

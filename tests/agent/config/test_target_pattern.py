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
    for deny in (False, True):
        assert TargetPattern.parse(pattern).matches(target, deny=deny) is matches


@pytest.mark.parametrize(
    "host",
    [
        "::ffff:10.1.2.3",
        "64:ff9b::a01:203",  # NAT64
        "2002:a01:203::1",  # 6to4
        "2001:0:a01:203::",  # Teredo, by its server
        "64:ff9b:1:a01:2:300::",  # NAT64 with a prefix of the network's own
    ],
)
def test_an_address_is_denied_in_all_of_its_spellings(host: str) -> None:
    assert TargetPattern.parse("10.0.0.0/8:*").matches(Address(host, 80), deny=True)


def test_an_address_that_may_lead_elsewhere_too_is_not_allowed() -> None:
    pattern = TargetPattern.parse("10.0.0.0/8:*")
    assert pattern.matches(Address("64:ff9b::a01:203", 80), deny=False)
    assert not pattern.matches(Address("2001:0:a01:203::", 80), deny=False)


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
        ("[::ffff:10.0.0.0/104]:80", "write the IPv4 address"),
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
    pattern.matches(Address("a.b", 80), deny=False)
    assert str(pattern) == text

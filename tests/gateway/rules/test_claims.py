"""Claims of tokens held against those of a rule, one that allows and one that denies."""

from __future__ import annotations

import fnmatch
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.rules.claims import (
    MAX_STARS,
    NO_TOKEN,
    ClaimPatterns,
    compile_claim,
)


def patterns(**claims: list[str]) -> ClaimPatterns:
    return ClaimPatterns(tuple((name, tuple(texts)) for name, texts in claims.items()))


@pytest.mark.parametrize(
    ("pattern", "text", "takes"),
    [
        ("me@example.com", "me@example.com", True),
        ("me@example.com", "ME@example.com", False),
        ("me@example.com", "me@example.com\n", False),
        ("me@example.com", "me@exampleXcom", False),
        ("*@example.com", "me@example.com", True),
        ("*@example.com", "@example.com", True),
        ("*@example.com", "me@example.com.evil.org", False),
        ("*@example.com", "me@evil.org\n@example.com", True),
        ("*", "", True),
        ("system:serviceaccount:demo-*:*", "system:serviceaccount:demo-a:hello", True),
        ("system:serviceaccount:demo-*:*", "system:serviceaccount:demo", False),
        ("a*b*b", "ab", False),
    ],
)
def test_a_pattern(pattern: str, text: str, takes: bool) -> None:
    assert bool(compile_claim(pattern).fullmatch(text)) is takes


@given(st.text(alphabet="ab*", max_size=12), st.text(alphabet="ab", max_size=12))
def test_patterns_are_globs(pattern: str, text: str) -> None:
    if pattern.count("*") <= MAX_STARS:
        assert bool(compile_claim(pattern).fullmatch(text)) is fnmatch.fnmatchcase(text, pattern)


def test_a_pattern_costs_little_whatever_it_is_held_against() -> None:
    pattern = compile_claim("*a" * MAX_STARS + "b")
    started = time.process_time()
    assert not pattern.fullmatch("a" * 16_000)
    assert time.process_time() - started < 1
    with pytest.raises(ValueError, match="9 stars, more than 8"):
        compile_claim("*" * 9)


@pytest.mark.parametrize(
    ("claim", "pattern", "allow", "deny"),
    [
        ("a", "a", True, True),
        ("b", "a", False, False),
        (["b", "a"], "a", True, True),
        (["b"], "a", False, False),
        ([], "*", False, False),
        (True, "true", True, True),
        (True, "1", False, False),
        (False, "true", False, False),
        (17, "17", True, True),
        # What nobody can read helps neither past a rule that denies nor to one that allows.
        (None, "*", False, True),
        ({"a": "a"}, "*", False, True),
        (1.5, "*", False, True),
        ([["a"]], "a", False, True),
        (["b", {}], "a", False, True),
        (["a", {}], "a", True, True),
    ],
)
def test_what_a_claim_may_be(claim: object, pattern: str, allow: bool, deny: bool) -> None:
    rule = patterns(groups=[pattern])
    assert (rule.allow({"groups": claim}), rule.deny({"groups": claim})) == (allow, deny)


@pytest.mark.parametrize(
    ("said", "allow", "deny"),
    [
        ({"email": "me@a.org", "sub": "1"}, True, True),
        ({"email": "me@b.org", "sub": "1"}, True, True),
        ({"email": "me@c.org", "sub": "1"}, False, False),
        ({"email": "me@a.org", "sub": "2"}, False, False),
        ({"email": "me@a.org"}, False, True),
        ({"sub": "2"}, False, False),
        ({}, False, True),
    ],
)
def test_all_claims_of_a_rule_and_one_pattern_of_each(said: dict[str, Any], allow: bool, deny: bool) -> None:
    rule = patterns(email=["*@a.org", "*@b.org"], sub=["1"])
    assert (rule.allow(said), rule.deny(said)) == (allow, deny)


def test_no_claims_are_any_good_token() -> None:
    assert patterns().allow({}) and patterns().deny({})


_claims = st.dictionaries(
    st.sampled_from(["a", "b"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text("xy", max_size=2), st.lists, max_leaves=3
    ),
)


@given(_claims)
def test_who_is_let_by_a_denying_rule_has_said_something_else(said: dict[str, Any]) -> None:
    rule = patterns(a=["x*"], b=["y*"])
    assert rule.deny(said) or not rule.allow(said)
    if not rule.deny(said):
        assert said, "to say nothing does not help"


async def test_no_token() -> None:
    await NO_TOKEN.prepare()
    assert (NO_TOKEN.claims(), NO_TOKEN.is_awaited) == (None, False)
    assert re.fullmatch(rb"Bearer( .*)?", NO_TOKEN.challenge)

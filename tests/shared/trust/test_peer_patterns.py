"""Patterns of SPIFFE IDs: what they take, and that Python and Envoy would agree."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shared.trust.peer_patterns import (
    MAX_ALIASES,
    MAX_STARS,
    PeerPatterns,
    TrustDomain,
    check_pattern,
    may_overlap,
    of_workloads,
    split_patterns,
)
from shared.trust.spiffe import MAX_URI_BYTES, SpiffeId

HELLO = "spiffe://demo.local/ns/demo/sa/hello"
DEMO = TrustDomain("demo.local")
MOVED = TrustDomain("demo.local", ("old.local", "older.local"))

names = st.text(alphabet="abc-._AB0", min_size=1, max_size=6).filter(lambda name: name not in (".", ".."))
domains = st.sampled_from(["demo.local", "old.local", "other.local"])
identities = st.builds(
    lambda domain, path: SpiffeId(domain, "".join(f"/{segment}" for segment in path)),
    domains,
    st.lists(names, min_size=1, max_size=5),
)


@pytest.mark.parametrize(
    ("pattern", "taken", "left"),
    [
        (HELLO, [HELLO], [HELLO + "/x", HELLO[:-1], "spiffe://demoxlocal/ns/demo/sa/hello"]),
        (
            "spiffe://demo.local/ns/*/sa/*",
            [HELLO, "spiffe://demo.local/ns/a.b-c_d/sa/X"],
            ["spiffe://other.local/ns/demo/sa/hello", "spiffe://demo.local/ns/a/b/sa/c", HELLO + "/x"],
        ),
        (
            "spiffe://demo.local/ns/demo/**",
            [HELLO, "spiffe://demo.local/ns/demo/x", HELLO + "/a/b/c"],
            ["spiffe://demo.local/ns/demo", "spiffe://demo.local/ns/demo2/x"],
        ),
        ("spiffe://demo.local/**", [HELLO, "spiffe://demo.local/x"], ["spiffe://demo.local", "spiffe://x/a"]),
        ("spiffe://demo.local", ["spiffe://demo.local"], [HELLO]),
        (
            "spiffe://demo.local/ns/demo-*/sa/*",
            ["spiffe://demo.local/ns/demo-1/sa/x", "spiffe://demo.local/ns/demo-/sa/x"],
            [HELLO, "spiffe://demo.local/ns/xdemo-1/sa/x", "spiffe://demo.local/ns/demo-1/x/sa/x"],
        ),
        (
            "spiffe://demo.local/a*b*c/**",
            ["spiffe://demo.local/abc/x", "spiffe://demo.local/a1b2bc/x/y", "spiffe://demo.local/abbcc/x"],
            ["spiffe://demo.local/abc", "spiffe://demo.local/acb/x", "spiffe://demo.local/ab/c/x"],
        ),
        (
            "ns/demo*/sa/*",
            [HELLO, "spiffe://demo.local/ns/demo2/sa/x"],
            ["spiffe://other.local/ns/demo/sa/hello", "spiffe://demo.local/ns/x/sa/hello", HELLO + "/x"],
        ),
    ],
)
def test_patterns(pattern: str, taken: list[str], left: list[str]) -> None:
    patterns = PeerPatterns([pattern], DEMO)
    for text in taken:
        assert patterns.matches(SpiffeId.parse(text)), text
        assert patterns.first(SpiffeId.parse(text)) == pattern
    for text in left:
        assert not patterns.matches(SpiffeId.parse(text)), text
        assert patterns.first(SpiffeId.parse(text)) is None


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("demo.local/ns/*", "does not start with spiffe://"),
        ("*", "does not start with spiffe://"),
        ("spiffe://*/ns/a", "the trust domain has to be written out"),
        ("spiffe://demo.local/ns/demo-**", "** stands only for all that follows"),
        ("spiffe://demo.local/**/sa/x", "** stands only for all that follows"),
        ("spiffe://demo.local/a//b", "segment is empty"),
        ("spiffe://demo.local/a/", "segment is empty"),
        ("spiffe://demo.local/[ab]", "segment may have only"),
        ("spiffe://demo.local/" + "a*" * (MAX_STARS + 1), "more than 8 stars"),
        ("spiffe://", "trust domain is empty"),
        ("spiffe://demo.local/" + "a" * MAX_URI_BYTES, "longer than 2048 bytes"),
        ("ns/demo", "not of the form ns/NAMESPACE/sa/ACCOUNT"),
        ("ns/demo/sa/**", "not of the form ns/NAMESPACE/sa/ACCOUNT"),
        ("ns/demo/sa/a/b", "not of the form ns/NAMESPACE/sa/ACCOUNT"),
        ("ns/demo/sa/", "segment is empty"),
    ],
)
def test_patterns_that_are_none(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        PeerPatterns([pattern], DEMO)


def test_everybody_where_the_caller_allows_it() -> None:
    patterns = PeerPatterns(["*", HELLO], anybody=True)
    stranger = SpiffeId("elsewhere", "/x")
    assert patterns.matches(stranger) and patterns.first(stranger) == "*"
    assert check_pattern("*", anybody=True) == "*"


def test_no_patterns_take_nobody() -> None:
    nobody = PeerPatterns([])
    assert not nobody and not nobody.matches(SpiffeId.parse(HELLO)) and nobody.regexes() == []


def test_a_pattern_of_our_own_domain_needs_to_know_it() -> None:
    with pytest.raises(ValueError, match="our own trust domain, which is not told"):
        PeerPatterns(["ns/demo/sa/*"])


@pytest.mark.parametrize(
    "pattern", ["ns/demo/sa/*", "spiffe://demo.local/ns/demo/sa/*", "spiffe://old.local/**"]
)
def test_a_peer_of_an_alias_counts_as_ours(pattern: str) -> None:
    patterns = PeerPatterns([pattern], MOVED)
    for domain in ("demo.local", "old.local", "older.local"):
        assert patterns.matches(SpiffeId(domain, "/ns/demo/sa/hello"))
    assert not patterns.matches(SpiffeId("other.local", "/ns/demo/sa/hello"))


def test_other_domains_have_no_part_in_our_aliases() -> None:
    patterns = PeerPatterns(["spiffe://other.local/**"], MOVED)
    assert patterns.matches(SpiffeId("other.local", "/x"))
    assert not any(patterns.matches(SpiffeId(domain, "/x")) for domain in ("demo.local", "old.local"))


@pytest.mark.parametrize(
    ("name", "aliases", "reason"),
    [
        ("", ("old.local",), "aliases need the trust domain"),
        ("demo.local", ("OLD",), "may have only a-z"),
        ("demo.local", ("",), "the trust domain is empty"),
        ("demo.local", ("a",) * (MAX_ALIASES + 1), "more than 16"),
    ],
)
def test_trust_domains_that_are_none(name: str, aliases: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TrustDomain(name, aliases)


def test_patterns_from_one_line() -> None:
    patterns = split_patterns(" spiffe://a/ns/*/sa/x ,ns/b-*/sa/* ,")
    assert patterns == ("spiffe://a/ns/*/sa/x", "ns/b-*/sa/*")
    assert repr(PeerPatterns(patterns, DEMO)) == "PeerPatterns(spiffe://a/ns/*/sa/x, ns/b-*/sa/*)"
    for empty in ("", " , "):
        with pytest.raises(ValueError, match="no SPIFFE ID pattern"):
            split_patterns(empty)
    with pytest.raises(ValueError, match="does not start with"):
        split_patterns("spiffe://a/b,c")


def test_a_namespace_and_an_account() -> None:
    assert of_workloads("demo-*", "*") == "ns/demo-*/sa/*"
    for namespace, account in (("a/b", "c"), ("**", "c"), ("a", ""), ("a", "b/c")):
        with pytest.raises(ValueError, match=r"segment|form"):
            of_workloads(namespace, account)


def test_regexes_that_envoy_can_take() -> None:
    assert PeerPatterns([HELLO, "spiffe://demo.local/ns/a-*/**"]).regexes() == [
        r"spiffe://demo\.local/ns/demo/sa/hello",
        r"spiffe://demo\.local/ns/a-[A-Za-z0-9._-]*(?:/[A-Za-z0-9._-]+)+",
    ]
    assert PeerPatterns(["ns/x/sa/y"], MOVED).regexes() == [
        r"spiffe://(?:demo\.local|old\.local|older\.local)/ns/x/sa/y"
    ]


def test_many_stars_cost_little() -> None:
    """With backtracking this would take longer than anybody lives."""
    patterns = PeerPatterns([f"spiffe://demo.local/{'a*' * MAX_STARS}b"])
    started = time.process_time()
    assert not patterns.matches(SpiffeId("demo.local", "/" + "a" * 2000))
    assert time.process_time() - started < 1


def takes(pattern: str, identity: SpiffeId, trust: TrustDomain) -> bool:
    """The rule in other words: segment by segment, without a regular expression."""
    if pattern.startswith("ns/"):
        pattern = f"spiffe://{trust.name}/{pattern}"
    domain, *wanted = pattern.removeprefix("spiffe://").split("/")
    own = (trust.name, *trust.aliases)
    if not (identity.trust_domain == domain or {identity.trust_domain, domain} <= set(own)):
        return False
    found = identity.path.split("/")[1:]
    if wanted and wanted[-1] == "**":
        wanted.pop()
        if len(found) <= len(wanted):
            return False
        found = found[: len(wanted)]
    return len(wanted) == len(found) and all(map(glob_takes, wanted, found))


def glob_takes(glob: str, text: str) -> bool:
    """A `*` takes nothing, or one character and maybe more."""
    if not glob:
        return not text
    if glob[0] == "*":
        return glob_takes(glob[1:], text) or (bool(text) and glob_takes(glob, text[1:]))
    return bool(text) and text[0] == glob[0] and glob_takes(glob[1:], text[1:])


@st.composite
def patterns_near(draw: st.DrawFn, identity: SpiffeId) -> str:
    """Patterns that often match: the identity with some segments starred, changed or cut off."""

    def starred(segment: str) -> str:
        first, last = sorted((draw(st.integers(0, len(segment))), draw(st.integers(0, len(segment)))))
        return f"{segment[:first]}*{segment[last:]}"

    kept = [
        draw(st.sampled_from([segment, "*", "x", starred(segment), starred(starred(segment))]))
        for segment in identity.path.split("/")[1:]
    ]
    cut = kept[: draw(st.integers(0, len(kept)))] if draw(st.booleans()) else kept
    tail = ["**"] if draw(st.booleans()) else []
    return "/".join([f"spiffe://{draw(domains)}", *cut, *tail])


@given(st.data(), identities, identities, st.sampled_from([DEMO, MOVED]))
def test_python_and_envoy_and_the_rule_agree(
    data: st.DataObject, one: SpiffeId, other: SpiffeId, trust: TrustDomain
) -> None:
    texts = data.draw(st.lists(patterns_near(one) | patterns_near(other), min_size=1, max_size=3))
    assume(not any("**" in segment for text in texts for segment in text.split("/")[:-1]))
    assume(not any("**" in text.split("/")[-1] and text.split("/")[-1] != "**" for text in texts))
    patterns = PeerPatterns(texts, trust)
    expected = [takes(text, one, trust) for text in texts]
    assert patterns.matches(one) is any(expected)
    assert [re.fullmatch(regex, str(one)) is not None for regex in patterns.regexes()] == expected
    assert patterns.first(one) == next(
        (text for text, is_so in zip(texts, expected, strict=True) if is_so), None
    )


@pytest.mark.parametrize(
    ("some", "others", "overlap"),
    [
        (["*"], ["spiffe://a/ns/x/sa/y"], True),
        (["spiffe://a/ns/x/sa/y"], ["spiffe://a/ns/x/sa/y"], True),
        (["spiffe://a/ns/x/sa/y"], ["spiffe://a/ns/x/sa/z"], False),
        (["spiffe://a/ns/x/sa/*"], ["spiffe://a/ns/*/sa/z"], True),
        (["spiffe://a/ns/x-*/sa/*"], ["spiffe://a/ns/*-y/sa/z"], True),
        (["spiffe://a/ns/x/**"], ["spiffe://a/ns/x/sa/y"], True),
        (["spiffe://a/ns/x/**"], ["spiffe://a/ns/y/**"], False),
        (["spiffe://a/ns/x"], ["spiffe://a/ns/x/sa/y"], False),
        (["spiffe://a/ns/x/sa/y"], ["spiffe://b/ns/x/sa/y"], True),  # b may be an alias
        (["ns/x/sa/*"], ["spiffe://a/ns/x/sa/y"], True),
        (["spiffe://a/ns/x/sa/y", "spiffe://a/ns/z/sa/y"], ["spiffe://a/ns/w/sa/y", "ns/z/sa/y"], True),
        ([], ["*"], False),
    ],
)
def test_lists_that_may_take_the_same_peer(some: list[str], others: list[str], overlap: bool) -> None:
    assert may_overlap(some, others) is overlap
    assert may_overlap(others, some) is overlap

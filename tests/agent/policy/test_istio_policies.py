"""What policies ask of a workload, beside what Istio would make of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.policy.istio_policies import (
    AUTHENTICATION,
    AUTHORIZATION,
    REQUEST_AUTHENTICATION,
    Demands,
    Policy,
    Workload,
    covered,
    demands,
)
from shared.trust.peer_patterns import PeerPatterns, TrustDomain
from shared.trust.spiffe import SpiffeId

TRUST = TrustDomain("demo.local")
HELLO = Workload("demo", {"app": "hello"}, TRUST, (8080, 15003), "istio-system")


def policy(spec: dict[str, Any], namespace: str = "demo", kind: str = AUTHORIZATION, **about: Any) -> Policy:
    metadata = {"namespace": namespace, "name": "it", **about}
    return Policy.of(kind, {"metadata": metadata, "spec": spec})


def source(**told: list[str]) -> dict[str, Any]:
    return {"rules": [{"from": [{"source": told}]}]}


def asked(*policies: Policy, workload: Workload = HELLO) -> Demands:
    return demands(policies, workload)


def reasons(*policies: Policy) -> list[str]:
    return [one.reason for one in asked(*policies).unenforced]


# Which ones apply.


@pytest.mark.parametrize(
    ("spec", "namespace", "applies"),
    [
        ({}, "demo", True),
        ({}, "istio-system", True),
        ({}, "other", False),
        ({"selector": {"matchLabels": {"app": "hello"}}}, "demo", True),
        ({"selector": {"matchLabels": {"app": "hello"}}}, "istio-system", True),
        ({"selector": {"matchLabels": {"app": "other"}}}, "demo", False),
        ({"selector": {"matchLabels": {"app": "hello", "version": "1"}}}, "demo", False),
        ({"selector": {}}, "demo", True),
        ({"targetRefs": [{"kind": "Gateway", "name": "g"}]}, "demo", False),
        ({"targetRef": {"kind": "Gateway", "name": "g"}}, "demo", False),
    ],
)
def test_selection(spec: dict[str, Any], namespace: str, applies: bool) -> None:
    assert policy(spec, namespace).applies(HELLO) == applies
    assert (asked(policy(spec, namespace)).allow == ()) == applies


# What they ask for.


def test_without_a_policy_nothing_is_asked_for() -> None:
    assert asked() == Demands(None, (), (), (), ())


def test_several_allow_together() -> None:
    one, other = policy(source(namespaces=["a"])), policy(source(namespaces=["b", "a"]))
    found = asked(one, other)
    assert (found.allow, found.allowing, found.deny) == (("ns/a/sa/*", "ns/b/sa/*"), (one, other), ())


def test_one_that_allows_everybody_lifts_the_bound() -> None:
    assert asked(policy(source(namespaces=["a"])), policy({"rules": [{}]})).allow is None


def test_one_without_rules_allows_nobody_and_denies_nobody() -> None:
    assert asked(policy({})).allow == ()
    assert asked(policy({"action": "DENY"})) == Demands(None, (), (), (), ())


def test_a_rule_without_a_source_denies_everybody() -> None:
    assert asked(policy({"action": "DENY", "rules": [{}]})).deny == ("spiffe://demo.local/**",)


def test_what_has_no_effect_asks_for_nothing() -> None:
    dry = policy(source(namespaces=["a"]), annotations={"istio.io/dry-run": "true"})
    assert asked(dry, policy({"action": "AUDIT", "rules": [{}]})) == Demands(None, (), (), (), ())
    wet = policy(source(namespaces=["a"]), annotations={"istio.io/dry-run": "false"})
    assert asked(wet).allow == ("ns/a/sa/*",)


@pytest.mark.parametrize(
    ("told", "patterns"),
    [
        ({"principals": ["demo.local/ns/a/sa/b"]}, ["ns/a/sa/b"]),
        ({"principals": ["cluster.local/ns/a/sa/b"]}, ["ns/a/sa/b"]),
        ({"principals": ["far.local/ns/a/sa/b"]}, ["spiffe://far.local/ns/a/sa/b"]),
        ({"principals": ["*/ns/a/sa/b"]}, ["ns/a/sa/b"]),
        ({"principals": ["*/sa/b"]}, ["ns/*/sa/b"]),
        ({"principals": ["demo.local/ns/a/*"]}, ["spiffe://demo.local/ns/a/**"]),
        ({"principals": ["demo.local/ns/a/sa/b*"]}, ["ns/a/sa/b*"]),
        ({"principals": ["demo.local/ns/a*"]}, ["spiffe://demo.local/ns/a*/**"]),
        ({"principals": ["demo.local/*"]}, ["spiffe://demo.local/**"]),
        ({"principals": ["*"]}, ["spiffe://demo.local/**"]),
        ({"namespaces": ["a", "b-*"]}, ["ns/a/sa/*", "ns/b-*/sa/*"]),
        ({"serviceAccounts": ["b", "a/b"]}, ["ns/demo/sa/b", "ns/a/sa/b"]),
    ],
)
def test_names_that_patterns_can_say(told: dict[str, list[str]], patterns: list[str]) -> None:
    assert asked(policy({"action": "DENY", **source(**told)})).deny == tuple(patterns)
    assert asked(policy(source(**told))).allow == tuple(patterns)


def test_a_rule_for_any_trust_domain_is_for_the_others_that_are_let_in_too() -> None:
    found = demands([policy({"action": "DENY", **source(namespaces=["a"])})], HELLO, ["far.local"])
    assert found.deny == ("ns/a/sa/*", "spiffe://far.local/ns/a/sa/*")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"action": "CUSTOM", "rules": [{}]}, "its action is CUSTOM"),
        ({"rules": [{"to": [{"operation": {"methods": ["GET"]}}]}]}, "rules[0] is about to, too"),
        (
            {"rules": [{"from": [], "when": [{"key": "source.ip", "values": ["10.0.0.1"]}]}]},
            "rules[0] is about when, too",
        ),
        (source(notPrincipals=["a"]), "rules[0].from[0] is about notPrincipals"),
        (source(ipBlocks=["10.0.0.0/8"]), "rules[0].from[0] is about ipBlocks"),
        (source(namespaces=["a"], ipBlocks=["::/0"]), "rules[0].from[0] is about ipBlocks and namespaces"),
        (source(), "rules[0].from[0] is about nothing"),
        (
            source(principals=["*-local/ns/a/sa/b"]),
            "rules[0].from[0] has principals '*-local/ns/a/sa/b', which is no pattern of names",
        ),
        (
            source(principals=["demo.local/ns/*/sa/b"]),
            "rules[0].from[0] has principals 'demo.local/ns/*/sa/b', which is no pattern of names",
        ),
        (
            source(principals=["demo*"]),
            "rules[0].from[0] has principals 'demo*', which is no pattern of names",
        ),
    ],
)
def test_what_patterns_cannot_say(spec: dict[str, Any], reason: str) -> None:
    assert reasons(policy(spec)) == [reason]


def test_a_suffix_that_istio_takes_for_a_regular_expression() -> None:
    (reason,) = reasons(policy(source(principals=["*/sa/a.b"])))
    assert reason.endswith("has principals '*/sa/a.b', which Istio takes for a regular expression")


@pytest.mark.parametrize(
    ("told", "is_dry_run"), [("true", True), ("T", True), ("1", True), ("tRue", False), ("yes", False)]
)
def test_a_dry_run_as_go_reads_it(told: str, is_dry_run: bool) -> None:
    one = policy(source(namespaces=["x"]), annotations={"istio.io/dry-run": told})
    assert one.is_dry_run == is_dry_run


def test_an_authentication_of_requests_takes_an_end_that_reads_jwts() -> None:
    about = {"namespace": "demo", "kind": REQUEST_AUTHENTICATION}
    assert reasons(policy({"jwtRules": [{"issuer": "x"}]}, **about)) == ["the mTLS end does not check JWTs"]
    assert reasons(policy({"jwtRules": []}, **about)) == []


def test_peers_are_bounded() -> None:
    many = policy(source(namespaces=[f"n{number}" for number in range(700)]))
    found = asked(many, many)
    assert len(found.allow or ()) == 700
    assert [one.reason for one in found.unenforced] == ["with it they name more than 1000 peers"]


def test_a_part_of_a_name_is_of_one_trust_domain_only() -> None:
    """Istio knows aliases in whole names only, our patterns in all."""
    aliases = Workload("demo", {}, TrustDomain("demo.local", ("old.local",)), (), "istio-system")
    assert asked(policy(source(principals=["old.local/ns/a/sa/b"])), workload=aliases).allow == ("ns/a/sa/b",)
    (unenforced,) = asked(policy(source(principals=["demo.local/ns/a/*"])), workload=aliases).unenforced
    assert unenforced.reason.endswith("which is not of the aliases")


# Beside Istio's own matchers (pilot/pkg/security/authz/matcher and model).

DOMAINS = ("demo.local", "far.local")


def istio_matches(field: str, value: str, name: str) -> bool:
    """Whether Istio's matcher for a source's field does."""
    if field == "namespaces":
        return re.fullmatch(f".*/ns/{'.*'.join(map(re.escape, value.split('*')))}/.*", name) is not None
    if field == "serviceAccounts":
        there, slash, account = value.rpartition("/")
        return name.endswith(f"/ns/{there if slash else 'demo'}/sa/{account}")
    if value == "*":
        return True
    if value.startswith("*"):
        return name.removeprefix("spiffe://").endswith(value[1:])
    if value.endswith("*"):
        return name.startswith(f"spiffe://{value[:-1]}")
    return name == f"spiffe://{value}"


word = st.text("abs-", min_size=1, max_size=3)
path = st.builds("ns/{}/sa/{}".format, word, word)
domain = st.sampled_from(DOMAINS)
names = st.builds("spiffe://{}/{}".format, domain, path)
principal = st.one_of(
    st.builds("{}/{}".format, domain, path),
    st.builds("{}/{}*".format, domain, path),
    st.builds("*/{}".format, path),
    st.builds("*/sa/{}".format, word),
    st.builds("{}/ns/{}*".format, domain, word),
    st.builds("{}/ns/{}/*".format, domain, word),
    st.builds("{}/ns/{}/sa*".format, domain, word),
    st.builds("{}/*".format, domain),
    st.text("ab/*.-", min_size=1, max_size=12),
)
namespace = st.text("abs-*", min_size=1, max_size=4)
account = st.one_of(word, st.builds("{}/{}".format, word, word))
told = st.one_of(
    st.tuples(st.just("principals"), principal),
    st.tuples(st.just("namespaces"), namespace),
    st.tuples(st.just("serviceAccounts"), account),
)


@given(told, names)
def test_patterns_mean_what_istio_means(told: tuple[str, str], name: str) -> None:
    """Of names in Istio's form, from trust domains that may come in; or there are no patterns."""
    field, value = told
    found = demands([policy({"action": "DENY", **source(**{field: [value]})})], HELLO, ["far.local"])
    if found.unenforced:
        return
    matches = PeerPatterns(found.deny, TRUST).matches(SpiffeId.parse(name))
    assert matches == istio_matches(field, value, name), found.deny


# Whether patterns enforce what is asked for.


@pytest.mark.parametrize(
    ("pattern", "by", "is_covered"),
    [
        ("ns/a/sa/b", ["ns/a/sa/b"], True),
        ("ns/a/sa/b", ["ns/*/sa/b"], True),
        ("ns/a/sa/b", ["spiffe://demo.local/**"], True),
        ("spiffe://demo.local/ns/a/sa/b", ["ns/a/sa/b"], True),
        ("spiffe://demo.local/ns/a/sa/*", ["ns/a/sa/*"], True),
        ("ns/a/sa/*", ["spiffe://demo.local/ns/a/sa/*"], True),
        ("ns/a/sa/b", ["ns/a/sa/c"], False),
        ("ns/a/sa/b", ["spiffe://far.local/**"], False),
        ("ns/a/sa/*", ["ns/a/sa/b"], False),
        ("spiffe://far.local/ns/a/sa/b", ["ns/a/sa/b"], False),
        ("ns/a/sa/b", [], False),
    ],
)
def test_cover(pattern: str, by: list[str], is_covered: bool) -> None:
    assert covered(pattern, PeerPatterns(by, TRUST), TRUST) == is_covered


# PeerAuthentication.


def mtls(mode: str, namespace: str = "demo", created: str = "1", **further: Any) -> Policy:
    spec = {"mtls": {"mode": mode}, **further}
    return policy(spec, namespace, AUTHENTICATION, creationTimestamp=created)


OWN: dict[str, Any] = {"selector": {"matchLabels": {"app": "hello"}}}


@pytest.mark.parametrize("mode", ["STRICT", "PERMISSIVE", "UNSET"])
def test_modes_that_need_no_plain_text(mode: str) -> None:
    assert reasons(mtls(mode), mtls(mode, "istio-system"), mtls(mode, **OWN)) == []


@pytest.mark.parametrize("scope", [{}, OWN, {"namespace": "istio-system"}])
def test_plain_text_cannot_come_in(scope: dict[str, Any]) -> None:
    assert reasons(mtls("DISABLE", **scope)) == [
        "its mode is DISABLE, and the mTLS end accepts no plain text"
    ]


def test_the_narrower_scope_counts_and_then_the_older_one() -> None:
    assert reasons(mtls("DISABLE", "istio-system"), mtls("STRICT")) == []
    assert reasons(mtls("DISABLE"), mtls("STRICT", **OWN)) == []
    assert reasons(mtls("DISABLE"), mtls("UNSET", **OWN)) != []
    assert reasons(mtls("DISABLE", created="2"), mtls("STRICT", created="1")) == []
    assert reasons(mtls("DISABLE", created="1"), mtls("STRICT", created="2")) != []


def test_ports() -> None:
    def ports(mode: str, **modes: str) -> list[str]:
        told = {number.removeprefix("p"): {"mode": one} for number, one in modes.items()}
        return reasons(mtls(mode, **OWN, portLevelMtls=told))

    assert ports("STRICT", p8080="DISABLE") == [
        "the mode of port 8080 is DISABLE, and the mTLS end accepts no plain text"
    ]
    assert ports("STRICT", p9090="DISABLE") == []
    assert ports("DISABLE", p8080="STRICT") == []
    assert ports("DISABLE", p8080="UNSET") != []


@given(
    st.recursive(
        st.none() | st.booleans() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(
                    ["spec", "metadata", "rules", "from", "source", "selector", "matchLabels", "mtls", "mode"]
                ),
                inner,
            )
        ),
    )
)
def test_any_json_is_read(item: Any) -> None:
    for kind in (AUTHORIZATION, AUTHENTICATION):
        read = Policy.of(kind, item)
        demands([read, Policy(kind, "demo", "", "", read.spec)], HELLO)

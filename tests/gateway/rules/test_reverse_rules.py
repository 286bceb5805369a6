"""Who may register which names."""

from __future__ import annotations

import pytest

from gateway.rules.reverse_rules import ReverseRule, ReverseRules, check_name_pattern
from shared.errors import DeniedError
from shared.trust.spiffe import SpiffeId

HELLO = SpiffeId.parse("spiffe://demo.local/ns/demo/sa/hello")
VM = SpiffeId.parse("spiffe://demo.local/vm/hello")
EVERYBODY = ("spiffe://demo.local/**",)


def allowed(rules: ReverseRules, identity: SpiffeId, name: str) -> bool:
    try:
        rules.check(identity, name)
    except DeniedError:
        return False
    return True


def test_without_a_rule_the_answer_is_no() -> None:
    rules = ReverseRules([])
    with pytest.raises(DeniedError, match=f"^peer {HELLO} may not register hello.demo: no rule allows it$"):
        rules.check(HELLO, "hello.demo")
    assert not rules.may_be_registered("hello.demo")


def test_a_glob() -> None:
    rules = ReverseRules([ReverseRule(EVERYBODY, ("*.demo.svc",))])
    assert allowed(rules, HELLO, "hello.demo.svc")
    assert allowed(rules, VM, "thing.demo.svc")
    assert not allowed(rules, VM, "any.thing.demo.svc")
    assert allowed(ReverseRules([ReverseRule(EVERYBODY, ("**.demo.svc",))]), VM, "any.thing.demo.svc")
    assert not allowed(rules, HELLO, "demo.svc")
    assert not allowed(rules, SpiffeId.parse("spiffe://other.local/ns/demo/sa/hello"), "hello.demo.svc")


def test_everybody_whom_the_roots_vouch_for() -> None:
    rules = ReverseRules([ReverseRule(("*",), ("hello.demo.svc",))])
    assert allowed(rules, SpiffeId.parse("spiffe://other.local/x"), "hello.demo.svc")


@pytest.mark.parametrize(
    ("identity", "name", "expected"),
    [
        ("spiffe://demo.local/ns/demo/sa/hello", "hello.demo.svc.cluster.local", True),
        ("spiffe://demo.local/ns/demo/sa/hello", "other.demo.svc.cluster.local", False),
        ("spiffe://demo.local/ns/demo/sa/hello", "hello.prod.svc.cluster.local", False),
        ("spiffe://demo.local/ns/demo/sa/hello", "x.hello.demo.svc.cluster.local", False),
        ("spiffe://demo.local/ns/demo/sa/a.b", "a.b.demo.svc.cluster.local", False),
        ("spiffe://demo.local/ns/demo/sa/-", "-.demo.svc.cluster.local", False),
        ("spiffe://demo.local/vm/hello", "hello.demo.svc.cluster.local", False),
    ],
)
def test_everybody_has_the_own_name_only(identity: str, name: str, expected: bool) -> None:
    rules = ReverseRules([ReverseRule(EVERYBODY, ("{service_account}.{namespace}.svc.cluster.local",))])
    assert allowed(rules, SpiffeId.parse(identity), name) == expected


def test_a_placeholder_beside_a_star() -> None:
    rules = ReverseRules([ReverseRule(EVERYBODY, ("*.{namespace}.svc",))])
    assert allowed(rules, HELLO, "thing.demo.svc")
    assert not allowed(rules, HELLO, "any.thing.demo.svc")
    assert not allowed(rules, HELLO, "thing.prod.svc")


def test_the_first_rule_decides() -> None:
    rules = ReverseRules(
        [
            ReverseRule((str(VM),), ("hello.demo.svc",), deny=True),
            ReverseRule(EVERYBODY, ("*.demo.svc",)),
            ReverseRule((str(HELLO),), ("hello.demo.svc",), deny=True),
        ]
    )
    assert allowed(rules, HELLO, "hello.demo.svc")
    with pytest.raises(DeniedError, match=r"rules\[0\] denies it"):
        rules.check(VM, "hello.demo.svc")


def test_what_may_be_registered_is_known_before_the_identity() -> None:
    rules = ReverseRules(
        [
            ReverseRule(EVERYBODY, ("denied.svc",), deny=True),
            ReverseRule(EVERYBODY, ("{service_account}.{namespace}.svc",)),
        ]
    )
    assert rules.may_be_registered("any.thing.svc")
    assert not rules.may_be_registered("thing.svc")
    assert not rules.may_be_registered("any.thing.else")
    assert not ReverseRules([ReverseRule(EVERYBODY, ("denied.svc",), deny=True)]).may_be_registered(
        "denied.svc"
    )


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("{service}.svc", "unknown placeholder {service}, known are {namespace} and {service_account}"),
        ("{namespace.svc", "letters, digits"),
        ("hello..svc", "empty label"),
        ("outbound_.80_._.hello.svc", "leave the rest out"),
        ("*.*.*.*.*.*.*.*.{namespace}", "9 stars"),
        ("", "letters, digits"),
        ("*{namespace}.svc", "a placeholder beside another or beside \\*"),
        ("{namespace}{service_account}.svc", "a placeholder beside another or beside \\*"),
        ("**.{namespace}*.svc", "a placeholder beside another or beside \\*"),
    ],
)
def test_what_is_no_pattern(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_name_pattern(pattern)

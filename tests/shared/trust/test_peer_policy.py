"""The verdict on a peer: deny first, then allow, else no; and what it says."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from shared.errors import DeniedError
from shared.trust.peer_patterns import TrustDomain
from shared.trust.peer_policy import PeerPolicy
from shared.trust.spiffe import SpiffeId

HELLO = SpiffeId("demo.local", "/ns/demo/sa/hello")
ALL = "spiffe://demo.local/**"


def verdict(policy: PeerPolicy, identity: SpiffeId) -> str:
    try:
        policy.check(identity)
    except DeniedError as error:
        return str(error)
    return "allowed"


def test_who_is_allowed_and_not_denied_may_come_in() -> None:
    policy = PeerPolicy([ALL], ["ns/demo/sa/bad*"], TrustDomain("demo.local"))
    assert verdict(policy, HELLO) == "allowed"
    bad = SpiffeId("demo.local", "/ns/demo/sa/bad-1")
    assert verdict(policy, bad) == f"peer {bad} denied: ns/demo/sa/bad* is denied"
    stranger = SpiffeId("other.local", "/ns/demo/sa/hello")
    assert verdict(policy, stranger) == f"peer {stranger} denied: no rule allows it"


def test_a_peer_of_an_alias_is_denied_as_ours_is() -> None:
    policy = PeerPolicy([ALL], ["ns/demo/sa/bad"], TrustDomain("demo.local", ("old.local",)))
    assert verdict(policy, SpiffeId("old.local", "/ns/demo/sa/hello")) == "allowed"
    assert "is denied" in verdict(policy, SpiffeId("old.local", "/ns/demo/sa/bad"))


def test_it_tells_its_rules() -> None:
    assert str(PeerPolicy([ALL])) == ALL
    assert str(PeerPolicy([ALL], [str(HELLO)])) == f"{ALL} but not {HELLO}"
    assert str(PeerPolicy([])) == "nobody"


paths = st.sampled_from(["/ns/a/sa/x", "/ns/a/sa/y", "/ns/b/sa/x", "/ns/b/sa/y"])
lists = st.lists(st.sampled_from(["ns/a/sa/*", "ns/*/sa/x", "ns/b/sa/y", "ns/*/sa/*"]), max_size=3)


@given(paths, lists, lists)
def test_deny_allow_no(path: str, allow: list[str], deny: list[str]) -> None:
    trust, identity = TrustDomain("demo.local"), SpiffeId("demo.local", path)

    def takes(patterns: list[str]) -> bool:
        return any(re.fullmatch(pattern.replace("*", "[^/]+"), path[1:]) for pattern in patterns)

    expected = takes(allow) and not takes(deny)
    assert (verdict(PeerPolicy(allow, deny, trust), identity) == "allowed") is expected

"""Envoy's words for who may come in; `test_envoy.py` asks a real Envoy what it makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.mtls.envoy_names import domains_of_roots, name_matchers, source
from shared.credentials.certificates.authority import Authority
from shared.trust.peer_patterns import TrustDomain
from shared.trust.peer_policy import PeerPolicy
from shared.trust.spiffe import SpiffeId
from tests.support.bundles import tell
from tests.support.revocation import Hierarchy, trust


def test_allowed_names_are_regular_expressions() -> None:
    policy = PeerPolicy(["ns/demo-*/sa/*"], (), TrustDomain("demo.local", ("old.local",)))
    regex = r"spiffe://(?:demo\.local|old\.local)/ns/demo-[A-Za-z0-9._-]*/sa/[A-Za-z0-9._-]+"
    assert name_matchers(policy) == [{"san_type": "URI", "matcher": {"safe_regex": {"regex": regex}}}]


def test_denied_names_are_lua() -> None:
    policy = PeerPolicy(["spiffe://demo.local/**"], ["spiffe://demo.local/ns/a*b/**"])
    [matcher] = name_matchers(policy)
    custom = matcher["matcher"]["custom"]
    assert custom["name"] == "envoy.string_matcher.lua"
    code = custom["typed_config"]["source_code"]["inline_string"]
    assert code == source(policy)
    assert 'local allow = {{{["demo.local"] = true}, {}, true}}' in code
    assert 'local deny = {{{["demo.local"] = true}, {{"ns"}, {"a", "b"}}, true}}' in code


def test_nobody_cannot_be_said() -> None:
    with pytest.raises(ValueError, match="empty allow list"):
        name_matchers(PeerPolicy([], ["spiffe://demo.local/**"]))


def test_the_domains_whose_roots_it_does_not_tell_apart(tmp_path: Path) -> None:
    ours, theirs, nameless = Authority.create("demo.local"), Authority.create("other.local"), Hierarchy()
    assert domains_of_roots(tmp_path) == [], "no files"
    ours.write(tmp_path, ours.issue(SpiffeId("demo.local", "/x")))
    assert domains_of_roots(tmp_path) == ["demo.local"]
    trust(tmp_path, ours.root_pem, nameless.root_pem)
    assert domains_of_roots(tmp_path) == ["demo.local"]
    tell(tmp_path, {"third.local": [nameless.root]})
    assert domains_of_roots(tmp_path) == ["demo.local", "third.local"]
    trust(tmp_path, ours.root_pem, theirs.root_pem, nameless.root_pem)
    assert domains_of_roots(tmp_path) == ["demo.local", "other.local", "third.local"]

"""Whose names an authority may vouch for."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from shared.credentials.certificates.authority import Authority
from shared.errors import ConfigError, DeniedError, UnavailableError
from shared.net.tls.root_files import trust_bundles as read
from shared.trust import trust_bundles
from shared.trust.roots import bundle_map
from shared.trust.spiffe import SpiffeId
from shared.trust.trust_bundles import TrustBundles
from tests.support.bundles import bundles, tell
from tests.support.revocation import Hierarchy, chain

OURS, THEIRS = "ours.example", "theirs.example"
US, THEM = SpiffeId(OURS, "/ns/demo/sa/hello"), SpiffeId(THEIRS, "/ns/demo/sa/hello")
OUR_ROOT, THEIR_ROOT = Authority.create(OURS), Authority.create(THEIRS)
NAMELESS, ANOTHER = Hierarchy(OURS), Hierarchy(THEIRS)
"""Authorities whose certificates have no URI, as Istio's."""


def told(**domains: list[Authority]) -> TrustBundles:
    return TrustBundles(
        bundle_map(bundles({f"{name}.example": roots for name, roots in domains.items()}), "x")
    )


def refused(found: TrustBundles, proof: list[bytes]) -> str:
    with pytest.raises(DeniedError) as caught:
        found.proved(proof)
    return str(caught.value).removeprefix("peer certificate denied: ")


def test_a_root_that_names_its_domain_vouches_for_that_only() -> None:
    found = TrustBundles()
    assert found.proved(chain(OUR_ROOT.issue(US), OUR_ROOT)) == US
    assert found.proved(chain(THEIR_ROOT.issue(THEM), THEIR_ROOT)) == THEM
    assert refused(found, chain(OUR_ROOT.issue(THEM), OUR_ROOT)) == (
        f"a root of {OURS} may not vouch for {THEM}"
    )
    assert refused(found, chain(THEIR_ROOT.issue(US), THEIR_ROOT)) == (
        f"a root of {THEIRS} may not vouch for {US}"
    )


def test_a_map_tells_whose_they_are() -> None:
    found = told(ours=[NAMELESS.root], theirs=[ANOTHER.root, THEIR_ROOT])
    assert found.proved(chain(NAMELESS.issue(US), NAMELESS.root)) == US
    assert found.proved(chain(ANOTHER.issue(THEM), ANOTHER.root)) == THEM
    assert found.proved(chain(THEIR_ROOT.issue(THEM), THEIR_ROOT)) == THEM
    assert refused(found, chain(NAMELESS.issue(THEM), NAMELESS.root)) == (
        f"a root of {OURS} may not vouch for {THEM}"
    )
    assert refused(found, chain(ANOTHER.issue(US), ANOTHER.root)) == (
        f"a root of {THEIRS} may not vouch for {US}"
    )


def test_a_domain_with_a_list_has_no_other_roots() -> None:
    found = told(theirs=[ANOTHER.root])
    assert refused(found, chain(NAMELESS.issue(THEM), NAMELESS.root)) == (
        f"a root of nobody known may not vouch for {THEM}"
    )
    assert refused(found, chain(THEIR_ROOT.issue(THEM), THEIR_ROOT)) == (
        f"a root of nobody known may not vouch for {THEM}"
    )
    assert found.proved(chain(NAMELESS.issue(US), NAMELESS.root)) == US, "of ours nothing is told"
    assert "may not vouch" in refused(told(theirs=[]), chain(THEIR_ROOT.issue(THEM), THEIR_ROOT))


def test_a_root_may_be_of_several() -> None:
    found = told(ours=[ANOTHER.root], theirs=[ANOTHER.root])
    for identity in (US, THEM):
        assert found.proved(chain(ANOTHER.issue(identity), ANOTHER.root)) == identity
    third = SpiffeId("third.example", "/x")
    assert refused(found, chain(ANOTHER.issue(third), ANOTHER.root)) == (
        f"a root of {OURS}, {THEIRS} may not vouch for {third}"
    )


def test_an_intermediate_that_names_its_domain_is_bound_too() -> None:
    """Its certificate here is a root's, which for what it names is the same."""
    found = told(ours=[NAMELESS.root], theirs=[NAMELESS.root])
    leaf, root = chain(OUR_ROOT.issue(THEM), NAMELESS.root)
    above = OUR_ROOT.root.public_bytes(Encoding.DER)
    assert refused(found, [leaf, above, root]) == f"an authority of {OURS} may not vouch for {THEM}"
    leaf, root = chain(OUR_ROOT.issue(US), NAMELESS.root)
    assert found.proved([leaf, above, root]) == US


def test_a_leaf_alone_has_to_have_come_with_its_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust_bundles, "MAX_LEAVES", 2)
    found = TrustBundles()
    ours = [chain(OUR_ROOT.issue(US), OUR_ROOT) for _ in range(3)]
    alien = chain(THEIR_ROOT.issue(US), THEIR_ROOT)
    assert refused(found, ours[0][:1]) == f"the chain that vouches for {US} is not known here"
    refused(found, alien)
    assert "is not known here" in refused(found, alien[:1]), "it was refused before"
    for proof in ours:
        assert found.proved(proof) == found.proved(proof[:1]) == US
    assert "is not known here" in refused(found, ours[0][:1]), "the first one is forgotten"


def test_it_proves_no_more_than_its_leaf() -> None:
    leaf, root = chain(OUR_ROOT.issue(dns_names=["x"]), OUR_ROOT)
    assert "0 URI names instead of one" in refused(TrustBundles(), [leaf, root])
    leaf = chain(OUR_ROOT.issue(US), OUR_ROOT)[0]
    assert "its chain cannot be read" in refused(TrustBundles(), [leaf, b"garbage"])


def test_authorities_are_read_anew_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust_bundles, "MAX_AUTHORITIES", 1)
    found = TrustBundles()
    for _ in range(2):
        assert found.proved(chain(OUR_ROOT.issue(US), OUR_ROOT)) == US
        assert found.proved(chain(THEIR_ROOT.issue(THEM), THEIR_ROOT)) == THEM


def test_the_file(tmp_path: Path) -> None:
    file = tmp_path / "trust_bundles.json"
    assert read(file).domains_of(NAMELESS.root.root) == frozenset()
    assert read(file).domains_of(OUR_ROOT.root) == {OURS}
    tell(tmp_path, {THEIRS: [NAMELESS.root, OUR_ROOT]})
    assert read(file).domains_of(NAMELESS.root.root) == {THEIRS}
    assert read(file).domains_of(OUR_ROOT.root) == {THEIRS}, "the map counts"
    file.write_text("oops")
    with pytest.raises(ConfigError, match=f"{file}: no map of SPIFFE bundles"):
        read(file)
    with pytest.raises(UnavailableError, match="it is a directory"):
        read(tmp_path)


NAMES = (OURS, THEIRS)
ROOTS = {OURS: OUR_ROOT, THEIRS: THEIR_ROOT, "": NAMELESS.root}


@given(
    st.sampled_from(NAMES),
    st.sampled_from([*NAMES, ""]),
    st.dictionaries(st.sampled_from(NAMES), st.lists(st.sampled_from([*NAMES, ""]), max_size=2)),
)
def test_a_name_is_vouched_for_by_its_own_roots(domain: str, root: str, listed: dict[str, list[str]]) -> None:
    """The rules, said once more and differently."""
    found = TrustBundles({name: [ROOTS[one].root for one in roots] for name, roots in listed.items()})
    identity = SpiffeId(domain, "/ns/demo/sa/hello")
    if domain in listed:
        good = root in listed[domain]
    else:
        good = root in (domain, "") and not any(root in roots for roots in listed.values())
    proof = chain(ROOTS[root].issue(identity), ROOTS[root])
    if good:
        assert found.proved(proof) == identity
    else:
        refused(found, proof)

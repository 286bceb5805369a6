"""Revocation lists: whose count, and about which certificates of a chain."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from shared.credentials.certificates.authority import Authority
from shared.errors import ALERT_CERTIFICATE_REVOKED, DeniedError, RevokedError
from shared.trust import revocations
from shared.trust.revocation_lists import parse
from shared.trust.revocations import Revocations
from shared.trust.spiffe import SpiffeId
from tests.support.revocation import HOUR_S, Hierarchy, chain, revocation_list, serial

HELLO = SpiffeId("demo.local", "/ns/demo/sa/hello")
DEMO = Authority.create("demo.local")
OTHER = Authority.create("demo.local")  # of the same name, with another key
LEAF = DEMO.issue(HELLO)
DER = Encoding.DER


def used(*lists: bytes, roots: tuple[Authority, ...] = (DEMO,)) -> Revocations:
    found = Revocations()
    found.use(parse(b"".join(lists)), [root.root for root in roots])
    return found


def test_a_revoked_leaf() -> None:
    asked = used(revocation_list(DEMO, serial(LEAF)))
    with pytest.raises(RevokedError) as caught:
        asked.check(chain(LEAF, DEMO))
    assert "it is revoked: serial number" in str(caught.value)
    assert f"{serial(LEAF):x}" in str(caught.value)
    assert (caught.value.alert, caught.value.flag) == (ALERT_CERTIFICATE_REVOKED, "DENY")
    asked.check(chain(DEMO.issue(HELLO), DEMO))


def test_who_was_let_in_is_found_by_a_few_bytes() -> None:
    asked = used(revocation_list(DEMO))
    proof = asked.check(chain(LEAF, DEMO))
    assert proof == asked.check(chain(LEAF, DEMO)) and len(proof) == 1 and len(proof[0][0]) == 16
    asked.look_up(proof)
    asked.use(parse(revocation_list(DEMO, serial(LEAF))), [DEMO.root])
    with pytest.raises(RevokedError):
        asked.look_up(proof)
    asked.use(parse(revocation_list(DEMO)), [DEMO.root])
    asked.look_up(proof)  # what was on hold


def test_a_list_counts_against_its_own_key_only() -> None:
    """Roots of the same name in several trust domains are usual with Istio."""
    leaf = OTHER.issue(HELLO)
    asked = used(revocation_list(DEMO, serial(leaf)), roots=(DEMO, OTHER))
    asked.check(chain(leaf, OTHER))
    assert len(asked.uncovered) == 1  # OTHER has no list


def test_several_domains_in_one_file() -> None:
    away = Authority.create("away.local")
    theirs = away.issue(SpiffeId("away.local", "/x"))
    asked = used(
        revocation_list(DEMO, serial(LEAF)), revocation_list(away, serial(theirs)), roots=(DEMO, away)
    )
    for revoked in (chain(LEAF, DEMO), chain(theirs, away)):
        with pytest.raises(RevokedError):
            asked.check(revoked)
    assert asked.uncovered == []


def test_several_lists_of_one_issuer_count_together() -> None:
    second = DEMO.issue(HELLO)
    asked = used(revocation_list(DEMO, serial(LEAF)), revocation_list(DEMO, serial(second)))
    for leaf in (LEAF, second):
        with pytest.raises(RevokedError):
            asked.check(chain(leaf, DEMO))


def test_an_overdue_list_counts() -> None:
    asked = used(revocation_list(DEMO, serial(LEAF), due_s=-HOUR_S))
    with pytest.raises(RevokedError):
        asked.check(chain(LEAF, DEMO))
    due = asked.lists[0].next_update
    assert due is not None and due < datetime.now(UTC)


def test_a_root_s_name_without_its_signature() -> None:
    asked = used(revocation_list(DEMO, serial(LEAF)))
    with pytest.raises(ValueError, match="is not signed by the root of that name"):
        asked.use(parse(revocation_list(OTHER)), [DEMO.root])
    with pytest.raises(RevokedError):  # the old one stays
        asked.check(chain(LEAF, DEMO))


# Intermediates.


def test_a_revoked_intermediate() -> None:
    mesh = Hierarchy()
    leaf = mesh.issue(HELLO)
    asked = used(revocation_list(mesh.root, mesh.intermediate.root.serial_number), roots=(mesh.root,))
    with pytest.raises(RevokedError, match="the certificate 1 above it is revoked"):
        asked.check(chain(leaf, mesh.root))


def test_an_intermediate_s_list_counts_as_soon_as_it_is_met() -> None:
    mesh = Hierarchy()
    leaf = mesh.issue(HELLO)
    asked = used(revocation_list(mesh.intermediate, serial(leaf)), roots=(mesh.root,))
    with pytest.raises(RevokedError, match="it is revoked"):
        asked.check(chain(leaf, mesh.root))


def test_an_intermediate_s_list_that_comes_later() -> None:
    mesh = Hierarchy()
    leaf = mesh.issue(HELLO)
    asked = used(revocation_list(mesh.root), roots=(mesh.root,))
    proof = asked.check(chain(leaf, mesh.root))
    assert len(proof) == 2
    asked.use(parse(revocation_list(mesh.intermediate, serial(leaf))), [mesh.root.root])
    with pytest.raises(RevokedError):
        asked.look_up(proof)


def test_an_intermediate_that_signs_no_lists_has_none() -> None:
    """RFC 5280 section 6.3.3 (f): a leaf's key usage has no cRLSign."""
    leaf = DEMO.issue(HELLO)
    certificate = x509.load_pem_x509_certificate(leaf.certificate_pem)
    assert not parse(revocation_list(DEMO))[0].signed_by(certificate)


def test_the_issuers_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocations, "MAX_ISSUERS", 2)
    meshes = [Hierarchy() for _ in range(4)]
    asked = used(revocation_list(DEMO))
    for _ in range(2):
        for mesh in meshes:
            proof = asked.check(chain(mesh.issue(HELLO), mesh.root))
            assert len(proof) == 2
    assert len(asked._intermediates) == 2 and len(asked._read) <= 4


def test_a_resumed_session_has_its_leaf_alone() -> None:
    mesh = Hierarchy()
    leaf = mesh.issue(HELLO)
    whole = chain(leaf, mesh.root)
    asked = used(revocation_list(mesh.root), roots=(mesh.root,))
    proof = asked.check(whole)
    assert asked.complete(whole[0]) == whole
    assert asked.check(asked.complete(whole[0])) == proof
    assert asked.complete(whole[-1]) == [whole[-1]], "a root has nobody above it"
    for stranger in (b"none", chain(LEAF, DEMO)[0]):
        with pytest.raises(DeniedError, match="peer certificate denied"):
            asked.complete(stranger)


def test_a_chain_that_cannot_be_read() -> None:
    with pytest.raises(DeniedError, match="its chain cannot be read"):
        used(revocation_list(DEMO)).check([b"none", DEMO.root.public_bytes(DER)])


def test_a_chain_that_is_too_long() -> None:
    """Else what is above could not be looked up."""
    with pytest.raises(DeniedError, match="more than 16 certificates"):
        used(revocation_list(DEMO)).check(chain(LEAF, DEMO) + [DEMO.root.public_bytes(DER)] * 15)

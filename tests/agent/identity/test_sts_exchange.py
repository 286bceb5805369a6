"""A caller's Kubernetes token on its way through Google's services, and what each refusal there comes to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from agent.identity.sts_exchange import GkeSts
from agent.identity.sts_server import JWT, StsServer
from shared.address import Address
from shared.errors import SubjectRefusedError, TargetRefusedError, TokenError
from tests.agent.identity.test_sts_server import Sts, form
from tests.support.google import Google
from tests.support.google_services import DATA_PLANE, WORKLOAD
from tests.support.metadata_server import Answer, unsigned_token

AUDIENCE = "https://hello.example"


@pytest.fixture
async def google() -> AsyncIterator[Google]:
    async with Google() as services:
        services.grants |= {(WORKLOAD, DATA_PLANE)}
        yield services


def exchange(google: Google, **settings: object) -> GkeSts:
    return GkeSts(google.settings(**settings), tls=google.tls)


async def test_a_federated_token(google: Google) -> None:
    subject = google.kubernetes_token()
    minted = await exchange(google).access_token(subject)
    assert google._owners[minted.token] == WORKLOAD
    [asked] = google.requests
    assert asked.json["subjectToken"] == subject


@pytest.mark.parametrize("exp", [10**400, float("inf"), "soon", None])
async def test_a_subject_whose_end_cannot_be_read(google: Google, exp: object) -> None:
    """Google decides about it; that its own answer says when the access token ends is enough for us."""
    google.faults["sts"] = Answer(b'{"access_token": "ya29.federated", "expires_in": 60}')
    subject = unsigned_token(aud="proj.svc.id.goog", exp=exp)
    assert (await exchange(google).access_token(subject)).token == "ya29.federated"


async def test_an_id_token(google: Google) -> None:
    minted = await exchange(google).id_token(google.kubernetes_token(), AUDIENCE)
    assert google.claims(minted.token, AUDIENCE)["email"] == DATA_PLANE
    assert [asked.service for asked in google.requests] == ["sts", "iam"]


async def test_nobody_gets_what_another_ones_token_was_good_for(google: Google) -> None:
    it = exchange(google)
    await it.id_token(google.kubernetes_token(), AUDIENCE)
    expired = google.kubernetes_token(lifetime_s=-60)
    with pytest.raises(SubjectRefusedError):
        await it.id_token(expired, AUDIENCE)
    with pytest.raises(SubjectRefusedError):
        await it.access_token(expired)


async def test_a_token_for_somebody_else(google: Google) -> None:
    with pytest.raises(SubjectRefusedError, match=r"it answered 400 \(invalid_grant\)") as refused:
        await exchange(google).access_token(google.kubernetes_token("istio-ca"))
    assert google.found_in(str(refused.value)) == []


async def test_a_subject_without_the_role(google: Google) -> None:
    google.grants.clear()
    with pytest.raises(SubjectRefusedError, match=r"PERMISSION_DENIED"):
        await exchange(google).id_token(google.kubernetes_token(), AUDIENCE)


@pytest.mark.parametrize("status", [408, 429, 500, 503])
async def test_what_is_not_the_subjects_fault(google: Google, status: int) -> None:
    google.faults["sts"] = Answer(b"", status)
    with pytest.raises(TokenError, match=f"it answered {status}") as failed:
        await exchange(google).access_token(google.kubernetes_token())
    assert not isinstance(failed.value, SubjectRefusedError)


async def test_nobody_answers(google: Google) -> None:
    google.closed.add("sts")
    with pytest.raises(TokenError, match=r"within 0\.1 s") as failed:
        await exchange(google, step_timeout_s=0.1).access_token(google.kubernetes_token())
    assert not isinstance(failed.value, SubjectRefusedError)


async def test_without_an_account_there_are_no_id_tokens(google: Google) -> None:
    it = exchange(google, project_number="")
    with pytest.raises(TargetRefusedError, match="PROJECT_NUMBER"):
        await it.id_token(google.kubernetes_token(), AUDIENCE)
    await it.access_token(google.kubernetes_token())


async def test_all_of_it_behind_a_port(google: Google) -> None:
    server = StsServer(exchange(google))
    sts = Sts(await server.start(Address("127.0.0.1", 0)))
    try:
        fields = form(subject_token=google.kubernetes_token(), subject_token_type=JWT, audience=AUDIENCE)
        answer = json.loads((await sts.post(fields)).body)
        assert google.claims(answer["access_token"], AUDIENCE)["email"] == DATA_PLANE
        assert 3590 <= answer["expires_in"] <= 3600
        google.grants.clear()
        refused = await sts.post(fields)
        assert (refused.status, json.loads(refused.body)["error"]) == (400, "invalid_request")
        assert google.found_in(refused.body.decode()) == []
    finally:
        await server.close(0)

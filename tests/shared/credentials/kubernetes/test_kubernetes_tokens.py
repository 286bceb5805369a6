"""TokenRequest, with a server that answers as Kubernetes does; in `make test-kube` with the real one."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import jwt
import pytest

from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
from shared.credentials.kubernetes.kubernetes_tokens import BoundObject, KubernetesTokens
from shared.credentials.tokens.minting import Minter
from shared.errors import TokenDeniedError, TokenError
from tests.support.api_server import (
    API_AUDIENCE,
    NAMESPACE,
    POD,
    SERVICE_ACCOUNT,
    ApiServer,
    Asked,
    LocalApiServer,
    access,
    api_server,
    status,
)
from tests.support.metadata_server import unsigned_token

AUDIENCE = "istio-ca"
NOW_S = 1_800_000_000.0


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as server:
        yield server


@pytest.fixture
async def local() -> AsyncIterator[LocalApiServer]:
    async with LocalApiServer(now=lambda: NOW_S) as server:
        yield server


def tokens(server: ApiServer, token: str | None = None, **settings: Any) -> KubernetesTokens:
    settings = {"namespace": NAMESPACE, "service_account": SERVICE_ACCOUNT, **settings}
    return KubernetesTokens(KubernetesApi(access(server, token)), **settings)


# What both servers do.


async def test_a_token_for_an_audience(server: ApiServer) -> None:
    minter: Minter = tokens(server)

    minted = await minter.mint(AUDIENCE)

    claims = await server.verify(minted.token, AUDIENCE)
    assert claims["sub"] == f"system:serviceaccount:{NAMESPACE}:{SERVICE_ACCOUNT}"
    assert minted.expires_at_s == pytest.approx(time.time() + 3600, abs=60)
    assert minter.identity == f"service account demo/hello at {server.url}"


async def test_each_audience_has_its_own(server: ApiServer) -> None:
    for audience in ("PROJECT.svc.id.goog", "https://hello.example/a?b=c", "ä audience"):
        minted = await tokens(server).mint(audience)
        assert (await server.verify(minted.token, audience))["aud"] == [audience]


async def test_a_token_for_the_server_itself(server: ApiServer) -> None:
    minted = await tokens(server).mint("")
    await server.verify(minted.token, API_AUDIENCE)


async def test_a_lifetime(server: ApiServer) -> None:
    minted = await tokens(server, lifetime_s=600).mint(AUDIENCE)
    assert minted.expires_at_s == pytest.approx(time.time() + 600, abs=60)


async def test_a_token_that_ends_with_its_pod(server: ApiServer) -> None:
    bound = BoundObject("Pod", POD, server.pod_uid)
    minted = await tokens(server, bound_to=bound).mint(AUDIENCE)
    claims = await server.verify(minted.token, AUDIENCE)
    assert claims["kubernetes.io"]["pod"] == {"name": POD, "uid": server.pod_uid}


async def test_a_pod_that_is_not_there(server: ApiServer) -> None:
    with pytest.raises(TokenDeniedError, match='404 NotFound: pods "gone" not found'):
        await tokens(server, bound_to=BoundObject("Pod", "gone")).mint(AUDIENCE)


async def test_without_the_permission_the_error_names_it(server: ApiServer) -> None:
    with pytest.raises(TokenDeniedError) as denied:
        await tokens(server, server.forbidden).mint(AUDIENCE)
    text = str(denied.value)
    assert text.startswith(f"no token of service account demo/hello: {server.url} answered 403 Forbidden: ")
    assert text.endswith("a Role has to allow us the verb create on serviceaccounts/token in namespace demo")


async def test_a_token_of_ours_that_the_server_does_not_know(server: ApiServer) -> None:
    with pytest.raises(
        TokenDeniedError, match="answered 401 Unauthorized; it does not know our token"
    ) as denied:
        await tokens(server, "made-up-T0ken").mint(AUDIENCE)
    assert "made-up" not in str(denied.value)


async def test_a_service_account_that_is_not_there(server: ApiServer) -> None:
    with pytest.raises(TokenDeniedError, match='404 NotFound: serviceaccounts "gone" not found'):
        await tokens(server, service_account="gone").mint(AUDIENCE)


async def test_a_lifetime_that_the_server_does_not_take(server: ApiServer) -> None:
    # Ours to refuse as a rule, so asked for past the check.
    minter = tokens(server)
    minter._lifetime_s = 60
    with pytest.raises(TokenDeniedError, match=r"422 Invalid: .*less than 10 minutes"):
        await minter.mint(AUDIENCE)


# What is refused before anybody is asked.


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"lifetime_s": 599}, "600"),
        ({"lifetime_s": 2**32 + 1}, "lifetime"),
        ({"namespace": "a/../../secrets"}, "namespace"),
        ({"service_account": "a/token?x"}, "service account"),
    ],
)
async def test_what_cannot_be_asked_for(local: LocalApiServer, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tokens(local, **settings)


# What a server could answer otherwise.


async def test_the_request(local: LocalApiServer) -> None:
    await tokens(local, now=lambda: NOW_S, bound_to=BoundObject("Pod", POD)).mint(AUDIENCE)
    [asked] = local.asked
    assert (asked.method, asked.path) == ("POST", "/api/v1/namespaces/demo/serviceaccounts/hello/token")
    assert json.loads(asked.body) == {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {
            "audiences": [AUDIENCE],
            "expirationSeconds": 3600,
            "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": POD},
        },
    }


async def test_a_server_that_gives_less_has_the_last_word(local: LocalApiServer) -> None:
    local.max_seconds = 900
    minted = await tokens(local, lifetime_s=86_400, now=lambda: NOW_S).mint(AUDIENCE)
    assert minted.expires_at_s == NOW_S + 900


def answered(token: object, stated: object = None, **others: object) -> tuple[int, bytes]:
    content = {"kind": "TokenRequest", "status": {"token": token, "expirationTimestamp": stated, **others}}
    return 201, json.dumps(content).encode()


async def test_the_earlier_end_counts(local: LocalApiServer) -> None:
    """The server extends tokens of a pod's default kind to a year, and states the end that it means."""
    year = unsigned_token(aud=[AUDIENCE], exp=NOW_S + 31_536_000)
    local.answer = lambda _: answered(year, "2027-01-15T09:00:00Z")  # NOW_S + 3600
    minted = await tokens(local, now=lambda: NOW_S).mint(AUDIENCE)
    assert minted.expires_at_s == NOW_S + 3600


GOOD = {"aud": [AUDIENCE], "exp": NOW_S + 600}


@pytest.mark.parametrize(
    ("answer", "reason", "told"),
    [
        ((200, b"<html>"), "unreachable", "broken answer from .*: no JSON object"),
        ((200, b"[]"), "unreachable", "broken answer from .*: no JSON object"),
        ((200, b"[" * 100_000), "unreachable", "broken answer from .*: no JSON object"),
        ((200, b"{}"), "garbled", "no TokenRequest with a token"),
        ((200, b'{"status": "yes"}'), "garbled", "no TokenRequest with a token"),
        (answered(None), "garbled", "no TokenRequest with a token"),
        (answered(7), "garbled", "no TokenRequest with a token"),
        (answered("opaque"), "garbled", "no JWT"),
        (answered("A" * 20_000), "garbled", "a token of more than 16384 bytes"),
        (
            answered(unsigned_token(aud=["x"], exp=NOW_S + 9)),
            "audience",
            "for audience x instead of 'istio-ca'",
        ),
        (answered(unsigned_token(exp=NOW_S + 9)), "audience", "instead of 'istio-ca'"),
        (answered(unsigned_token(aud=AUDIENCE)), "garbled", "without an expiry"),
        (
            answered(unsigned_token(aud=AUDIENCE, exp=NOW_S - 5)),
            "expired",
            "expired 5 s ago; is the clock right",
        ),
        (answered(unsigned_token(**GOOD), "tomorrow"), "garbled", "unreadable expirationTimestamp"),
        ((301, b""), "refused", "answered 301"),
        (status(403, "Forbidden", "no"), "refused", "answered 403 Forbidden: no"),
        (status(503, "ServiceUnavailable", "away"), "refused", "answered 503 ServiceUnavailable: away"),
    ],
)
async def test_answers_that_are_no_good(
    local: LocalApiServer, answer: tuple[int, bytes], reason: str, told: str
) -> None:
    """`reason` is for the metrics."""
    local.answer = lambda _: answer
    with pytest.raises(TokenError, match=told) as error:
        await tokens(local, now=lambda: NOW_S).mint(AUDIENCE)
    assert error.value.reason == reason
    assert "eyJ" not in str(error.value) and local.allowed not in str(error.value)


@pytest.mark.parametrize(
    ("code", "final"), [(403, True), (404, True), (422, True), (429, False), (500, False)]
)
async def test_what_may_be_otherwise_in_a_moment(local: LocalApiServer, code: int, final: bool) -> None:
    local.answer = lambda _: status(code, "Reason", "message")
    with pytest.raises(TokenError) as error:
        await tokens(local).mint(AUDIENCE)
    assert isinstance(error.value, TokenDeniedError) is final


async def test_a_signature_of_another_cluster_is_noticed_by_the_test(local: LocalApiServer) -> None:
    async with LocalApiServer(now=lambda: NOW_S) as other:
        minted = await tokens(other, now=lambda: NOW_S).mint(AUDIENCE)
    with pytest.raises(jwt.InvalidSignatureError):
        await local.verify(minted.token, AUDIENCE)


async def test_a_server_that_asks_for_more_is_asked_once(local: LocalApiServer) -> None:
    """A token that is rejected, and has no successor, is not sent again."""
    seen: list[Asked] = local.asked
    with pytest.raises(TokenDeniedError):
        await tokens(local, "made-up").mint(AUDIENCE)
    assert len(seen) == 1

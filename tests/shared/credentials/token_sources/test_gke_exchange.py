"""The exchange of the original: a Kubernetes token, Google's STS, IAM; and what each of them may answer."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from shared.credentials.token_sources.gke_exchange import FederatedToken, GkeExchange, ProjectedToken
from shared.credentials.token_sources.token_settings import TokenSettings
from shared.credentials.tokens.minting import Minted
from shared.errors import TokenError, UsageError
from tests.support.google import Google
from tests.support.google_services import CLUSTER, DATA_PLANE, POOL, TRUST_DOMAIN, WORKLOAD
from tests.support.metadata_server import Answer

AUDIENCE = "https://hello.example"
OTHER = "other@proj.iam.gserviceaccount.com"


@pytest.fixture
def google(google: Google) -> Google:
    google.grants |= {(WORKLOAD, DATA_PLANE), (WORKLOAD, OTHER)}
    return google


class Kubernetes:
    """Gives tokens for the audience that is asked for."""

    def __init__(self, google: Google) -> None:
        self.google = google
        self.audiences: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def mint(self, audience: str) -> Minted:
        self.audiences.append(audience)
        await self.answers.wait()
        return Minted(self.google.kubernetes_token(audience), time.time() + 600)


def exchange(google: Google, **settings: object) -> GkeExchange:
    return GkeExchange(google.settings(**settings), Kubernetes(google).mint, tls=google.tls)


async def refusal(google: Google, minter: GkeExchange) -> str:
    with pytest.raises(TokenError) as caught:
        await minter.mint(AUDIENCE)
    text = str(caught.value)
    assert google.found_in(text) == []
    assert "\n" not in text
    return text


async def test_the_way_of_the_original(google: Google) -> None:
    kubernetes = Kubernetes(google)
    minter = GkeExchange(google.settings(), kubernetes.mint, tls=google.tls)
    minted = await minter.mint(AUDIENCE)
    assert google.claims(minted.token, AUDIENCE)["email"] == DATA_PLANE
    assert kubernetes.audiences == [TRUST_DOMAIN]
    sts, iam = google.requests
    assert (sts.service, iam.service) == ("sts", "iam")
    assert sts.json["audience"] == CLUSTER
    assert iam.path == f"/v1/projects/-/serviceAccounts/{DATA_PLANE}:generateIdToken"
    assert minter.identity == f"{DATA_PLANE} by the workload in {TRUST_DOMAIN}"


async def test_another_service_account(google: Google) -> None:
    minted = await exchange(google, service_account=OTHER).mint(AUDIENCE)
    assert google.claims(minted.token, AUDIENCE)["email"] == OTHER


async def test_a_workload_identity_pool(google: Google) -> None:
    kubernetes = Kubernetes(google)
    settings = google.settings(sts_audience=POOL, cluster_name="", service_account=OTHER)
    await GkeExchange(settings, kubernetes.mint, tls=google.tls).mint(AUDIENCE)
    assert kubernetes.audiences == [f"https:{POOL}"]


async def test_the_access_token_is_kept_and_asked_for_once(google: Google) -> None:
    minter = exchange(google)
    await asyncio.gather(*(minter.mint(f"https://{number}.example") for number in range(10)))
    assert len(google.asked("sts")) == 1
    assert len(google.asked("iam")) == 10


async def test_an_access_token_lives_as_long_as_sts_says(google: Google) -> None:
    google.access_lifetime_s = 59  # less than what is left out of use at a token's end
    minter = exchange(google)
    await minter.mint(AUDIENCE)
    await minter.mint(AUDIENCE)
    assert len(google.asked("sts")) == 2


async def test_without_expires_in_it_ends_with_the_kubernetes_token(google: Google) -> None:
    google.faults["sts"] = Answer(b'{"access_token": "ya29.federated"}')
    federated = FederatedToken(google.settings(), Kubernetes(google).mint, tls=google.tls)
    minted = await federated.access_token()
    assert minted.expires_at_s == pytest.approx(time.time() + 600, abs=60)


async def test_a_revoked_access_token_is_replaced_once(google: Google) -> None:
    minter = exchange(google)
    await minter.mint(AUDIENCE)
    google.revoke_all()
    await minter.mint(AUDIENCE)
    assert [request.service for request in google.requests] == ["sts", "iam", "iam", "sts", "iam"]


async def test_an_access_token_that_iam_never_takes(google: Google) -> None:
    google.faults["iam"] = Answer(b'{"error": {"status": "UNAUTHENTICATED"}}', 401)
    text = await refusal(google, exchange(google))
    assert text.endswith("it answered 401 (UNAUTHENTICATED); it does not take the access token")
    assert len(google.requests) == 4


async def test_a_missing_role(google: Google) -> None:
    google.grants.clear()
    text = await refusal(google, exchange(google))
    assert "it answered 403 (PERMISSION_DENIED)" in text
    assert f"roles/iam.workloadIdentityUser, on the service account {DATA_PLANE}" in text


async def test_a_kubernetes_token_that_sts_does_not_take(google: Google) -> None:
    async def another(audience: str) -> Minted:
        return Minted(google.kubernetes_token("somebody else"), time.time() + 600)

    minter = GkeExchange(google.settings(), another, tls=google.tls)
    assert await refusal(google, minter) == (
        f"no token from Google's STS at {google.url[8:]}: it answered 400 (invalid_grant); is it the right "
        "cluster and project, with Workload Identity switched on?"
    )


@pytest.mark.parametrize("service", ["sts", "iam"])
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Answer(b"<html>login</html>"), "is no JSON object"),
        (Answer(b"SECRET-SECRET", 403), "it answered 403; "),
        (Answer(b'{"error": "secret secret"}', 500), "it answered 500"),
        (Answer(b"{}"), "its answer has n"),
        (Answer(b'{"access_token": "a b", "token": "a b"}'), "token"),
        (Answer(b'{"access_token": 7, "token": 7}'), "its answer has n"),
        (Answer(b"x" * 70_000), "is longer than 65536 bytes"),
        (Answer(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"), "broken answer"),
    ],
)
async def test_an_answer_that_is_none(google: Google, service: str, answer: Answer, says: str) -> None:
    google.secrets.add("SECRET-SECRET")
    google.faults[service] = answer
    assert says in await refusal(google, exchange(google))


@pytest.mark.parametrize("service", ["sts", "iam"])
async def test_a_service_that_does_not_answer(google: Google, service: str) -> None:
    google.closed.add(service)
    assert "within 0.2 s" in await refusal(google, exchange(google, step_timeout_s=0.2))


async def test_kubernetes_does_not_answer(google: Google) -> None:
    kubernetes = Kubernetes(google)
    kubernetes.answers.clear()
    minter = GkeExchange(google.settings(step_timeout_s=0.05), kubernetes.mint, tls=google.tls)
    assert await refusal(google, minter) == "no Kubernetes token within 0.05 s"


def test_what_has_to_be_set(google: Google) -> None:
    async def never(audience: str) -> Minted:
        raise AssertionError

    with pytest.raises(UsageError, match="set PROJECT_ID, CLUSTER_NAME and CLUSTER_LOCATION, or"):
        FederatedToken(TokenSettings(project_id="proj"), never)
    with pytest.raises(UsageError, match="set PROJECT_NUMBER"):
        GkeExchange(TokenSettings(sts_audience=POOL), never)


# A projected token.


@pytest.mark.parametrize(
    ("audience", "lifetime_s", "says"),
    [
        ("istio-ca", 600, f"it is for istio-ca, not for {TRUST_DOMAIN}"),
        (TRUST_DOMAIN, -60, "expired 6"),
    ],
)
async def test_a_projected_token_that_is_no_good(
    google: Google, tmp_path: Path, audience: str, lifetime_s: float, says: str
) -> None:
    file = tmp_path / "token"
    file.write_text(google.kubernetes_token(audience, lifetime_s=lifetime_s))
    minter = GkeExchange(google.settings(), ProjectedToken(file).mint, tls=google.tls)
    text = await refusal(google, minter)
    assert says in text
    assert str(file) in text
    assert google.requests == []

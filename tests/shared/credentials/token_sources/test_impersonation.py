"""ID tokens of an account by somebody else's access token; `test_gke_exchange` and `test_google_credentials`
have the whole ways that end so."""

from __future__ import annotations

import pytest

from shared.credentials.token_sources.impersonation import Impersonated, id_token_url
from shared.credentials.token_sources.metadata_access import MetadataAccess
from shared.errors import TokenError
from tests.support.google import Google
from tests.support.google_services import MACHINE

ACCOUNT = "other@proj.iam.gserviceaccount.com"
BETWEEN = "between@proj.iam.gserviceaccount.com"
AUDIENCE = "https://hello.example"


def impersonated(google: Google, *delegates: str) -> Impersonated:
    return Impersonated(
        MetadataAccess(google.metadata_host),
        ACCOUNT,
        id_token_url(google.url, ACCOUNT),
        delegates=[f"projects/-/serviceAccounts/{name}" for name in delegates],
        timeout_s=5,
        tls=google.tls,
    )


async def test_the_machine_speaks_for_an_account(google: Google) -> None:
    google.grants.add((MACHINE, ACCOUNT))
    minter = impersonated(google)
    minted = await minter.mint(AUDIENCE)
    claims = google.claims(minted.token, AUDIENCE)
    assert (claims["email"], claims["exp"]) == (ACCOUNT, minted.expires_at_s)
    assert minter.identity == f"{ACCOUNT} by metadata server at {google.metadata_host}"


async def test_over_another_account(google: Google) -> None:
    google.grants |= {(MACHINE, BETWEEN), (BETWEEN, ACCOUNT)}
    with pytest.raises(TokenError, match="PERMISSION_DENIED"):
        await impersonated(google).mint(AUDIENCE)
    await impersonated(google, BETWEEN).mint(AUDIENCE)


async def test_the_token_that_iam_gives_is_looked_at(google: Google) -> None:
    google.grants.add((MACHINE, ACCOUNT))
    google.audience = "https://elsewhere.example"
    with pytest.raises(TokenError, match="it is for https://elsewhere"):
        await impersonated(google).mint(AUDIENCE)
    google.audience, google.lifetime_s = None, -5
    with pytest.raises(TokenError, match="it expired"):
        await impersonated(google).mint(AUDIENCE)

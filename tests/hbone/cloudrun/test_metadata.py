"""The stand-in's metadata server, asked by our own token source and by curl."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from urllib.parse import quote

import pytest

from hbone.cloudrun.metadata import MetadataServer
from shared.address import Address
from shared.credentials.token_sources.metadata import MetadataMinter
from shared.net.http1 import Response, get
from shared.trust.jwt_check import TokenChecker
from tests.hbone.cloudrun.world import URL, Credentials
from tests.support.process import run
from tests.support.tcp_peer import PATIENCE_S

EMAIL = "gateway@local.iam.gserviceaccount.com"
ACCOUNT = "/computeMetadata/v1/instance/service-accounts/default"
FLAVOR = {"metadata-flavor": "Google"}


@pytest.fixture
async def address(credentials: Credentials) -> AsyncIterator[Address]:
    server = MetadataServer(credentials.issuer, EMAIL)
    address = await server.start(Address("127.0.0.1", 0))
    try:
        yield address
    finally:
        await server.close()


async def ask(address: Address, path: str, headers: dict[str, str]) -> Response:
    return await get(f"http://{address}{path}", headers=headers, timeout_s=PATIENCE_S, max_bytes=10_000)


async def test_our_token_source_gets_a_token_that_the_front_end_takes(
    address: Address, credentials: Credentials
) -> None:
    token = (await MetadataMinter(str(address)).mint(URL)).token
    issuer = credentials.issuer
    claims = TokenChecker(issuer.public_keys, {URL}, issuer.name).check(f"Bearer {token}")
    assert claims["aud"] == URL
    assert claims["email"] == EMAIL
    assert claims["exp"] - claims["iat"] == 3600


@pytest.mark.parametrize("headers", [{}, {"metadata-flavor": "google"}, {"x-google": "Metadata-Flavor"}])
async def test_the_header_is_required(address: Address, headers: dict[str, str]) -> None:
    """So that no page in a browser and no redirect can ask."""
    for path in (f"{ACCOUNT}/identity?audience=x", f"{ACCOUNT}/email"):
        answer = await ask(address, path, headers)
        assert (answer.status, answer.body) == (
            403,
            b"Missing required header: Metadata-Flavor: Google\n",
        )


@pytest.mark.parametrize("query", ["", "?audience=", "?format=full"])
async def test_the_audience_is_required(address: Address, query: str) -> None:
    answer = await ask(address, f"{ACCOUNT}/identity{query}", FLAVOR)
    assert (answer.status, answer.body) == (400, b"non-empty audience parameter required\n")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (f"{ACCOUNT}/email", EMAIL),
        ("/computeMetadata/v1/project/project-id", "local"),
        ("/computeMetadata/v1/project/numeric-project-id", "1"),
        ("/computeMetadata/v1/instance/region", "projects/1/regions/local"),
    ],
)
async def test_what_else_is_known(address: Address, path: str, text: str) -> None:
    answer = await ask(address, path, FLAVOR)
    assert (answer.status, answer.body.decode()) == (200, text)
    assert answer.headers["metadata-flavor"] == "Google"


async def test_are_you_one(address: Address) -> None:
    """Google's libraries ask so, without the header, and look at the answer's."""
    answer = await ask(address, "/", {})
    assert (answer.status, answer.headers["metadata-flavor"]) == (200, "Google")


async def test_nothing_that_is_a_credential_for_anything_real(address: Address) -> None:
    assert (await ask(address, f"{ACCOUNT}/token", FLAVOR)).status == 404


@pytest.mark.shows_secret  # curl prints what it was given
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl command")
@pytest.mark.parametrize(
    "query",
    [
        f"audience={quote(URL, safe='')}&format=full",
        pytest.param(f"audience={URL}&format=full", id="as Google's documentation has it"),
    ],
)
async def test_curl(address: Address, credentials: Credentials, query: str) -> None:
    url = f"http://{address}{ACCOUNT}/identity?{query}"
    _, token, _ = await run("curl", "--silent", "--header", "Metadata-Flavor: Google", url)
    issuer = credentials.issuer
    TokenChecker(issuer.public_keys, {URL}, issuer.name).check(f"Bearer {token.decode()}")

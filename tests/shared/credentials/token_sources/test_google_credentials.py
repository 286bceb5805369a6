"""Every kind of Google's credentials gives ID tokens, or says why not, and tells no secret."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from shared.credentials.token_sources.google_credentials import GoogleCredentials
from shared.errors import TokenError
from shared.tasks import spawn
from tests.support.error_texts import all_texts
from tests.support.google import Google
from tests.support.google_services import AWS_ROLE, AWS_TYPE, POOL, WORKLOAD
from tests.support.metadata_server import PATIENCE_S, Answer, closed_port

AUDIENCE = "https://hello.example"
OWN = "own@proj.iam.gserviceaccount.com"
OTHER = "other@proj.iam.gserviceaccount.com"
THIRD = "third@proj.iam.gserviceaccount.com"
USER = "user@example.com"


class World:
    """A credentials file and what reads it."""

    def __init__(self, google: Google, folder: Path) -> None:
        self.google = google
        self.file = folder / "credentials.json"

    def credentials(self, content: object, **settings: Any) -> GoogleCredentials:
        self.write(content)
        return GoogleCredentials(self.google.settings(credentials=self.file, **settings), tls=self.google.tls)

    def write(self, content: object) -> None:
        self.file.write_text(content if isinstance(content, str) else json.dumps(content))

    async def claims(self, content: object, **settings: Any) -> dict[str, Any]:
        minted = await self.credentials(content, **settings).mint(AUDIENCE)
        claims = self.google.claims(minted.token, AUDIENCE)
        assert minted.expires_at_s == claims["exp"]
        return claims

    async def refusal(self, content: object, **settings: Any) -> str:
        """The text of the TokenError, with everything that hangs on it looked through for secrets."""
        with pytest.raises(TokenError) as caught:
            await self.credentials(content, **settings).mint(AUDIENCE)
        assert self.google.found_in(all_texts(caught.value)) == []
        text = str(caught.value)
        assert "\n" not in text
        return text


@pytest.fixture
def world(google: Google, tmp_path: Path) -> World:
    return World(google, tmp_path)


# A key.


@pytest.mark.parametrize("told", ["", OWN], ids=["nothing said", "told to speak for itself"])
async def test_a_key_has_tokens_of_its_own(world: World, told: str) -> None:
    claims = await world.claims(world.google.service_account_file(OWN), service_account=told)
    assert claims["sub"] == OWN
    assert [request.service for request in world.google.requests] == ["oauth"]


async def test_a_key_that_speaks_for_another_account(world: World) -> None:
    world.google.grants.add((OWN, OTHER))
    claims = await world.claims(world.google.service_account_file(OWN), service_account=OTHER)
    assert (claims["sub"], claims["email"]) == (OTHER, OTHER)
    assert [request.service for request in world.google.requests] == ["oauth", "iam"]


async def test_a_key_that_was_replaced_is_read_again(world: World) -> None:
    minter = world.credentials(world.google.service_account_file(OWN))
    await minter.mint(AUDIENCE)
    world.write(world.google.service_account_file(OTHER))
    minted = await minter.mint(AUDIENCE)
    assert world.google.claims(minted.token, AUDIENCE)["sub"] == OTHER


async def test_a_key_that_google_does_not_know(world: World) -> None:
    file = world.google.service_account_file(OWN)
    file["private_key_id"] = OTHER
    assert await world.refusal(file) == (
        f"no token with credentials file {world.file}: {world.google.url[8:]} answered 400 (invalid_grant)"
    )


async def test_a_key_that_is_none(world: World) -> None:
    file = world.google.service_account_file(OWN)
    file["private_key"] = world.google.secret("-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0\n")
    text = await world.refusal(file)
    assert text == f"cannot use credentials file {world.file}: its private_key is no private key"
    assert world.google.requests == []


# Impersonation.


async def test_impersonation_by_a_user(world: World) -> None:
    world.google.grants.add((USER, OTHER))
    claims = await world.claims(world.google.impersonation_file(OTHER, world.google.user_file(USER)))
    assert claims["email"] == OTHER
    assert world.google.requests[-1].json == {"audience": AUDIENCE, "includeEmail": True, "delegates": []}


async def test_impersonation_by_a_key_over_delegates_and_on_to_another(world: World) -> None:
    world.google.grants |= {(OWN, THIRD), (THIRD, OTHER), (OTHER, "last@proj.iam.gserviceaccount.com")}
    file = world.google.impersonation_file(OTHER, world.google.service_account_file(OWN), THIRD)
    assert (await world.claims(file))["email"] == OTHER
    last = "last@proj.iam.gserviceaccount.com"
    assert (await world.claims(file, service_account=last))["email"] == last


async def test_impersonation_without_the_role(world: World) -> None:
    text = await world.refusal(world.google.service_account_file(OWN), service_account=OTHER)
    assert text == (
        f"no token from Google's IAM at {world.google.url[8:]}: it answered 403 (PERMISSION_DENIED); "
        f"credentials file {world.file} needs the role roles/iam.serviceAccountOpenIdTokenCreator, or on GKE "
        f"roles/iam.workloadIdentityUser, on the service account {OTHER}, which has to exist"
    )


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        (
            "service_account_impersonation_url",
            "https://iam.example/",
            "its service_account_impersonation_url",
        ),
        ("delegates", "me", "its delegates are no list of names"),
        ("source_credentials", None, "source_credentials of credentials file"),
        ("source_credentials", {"type": "authorized_user"}, "authorized_user without a text client_id"),
    ],
)
async def test_impersonation_with_a_wrong_field(world: World, field: str, value: object, says: str) -> None:
    file = world.google.impersonation_file(OTHER, world.google.user_file(USER))
    assert says in await world.refusal(file | {field: value})
    assert world.google.requests == []


async def test_impersonation_of_an_impersonation(world: World) -> None:
    file = world.google.impersonation_file(OTHER, world.google.impersonation_file(OTHER))
    assert "are impersonated themselves" in await world.refusal(file)


async def test_no_token_leaves_in_the_clear(world: World) -> None:
    file = world.google.service_account_file(OWN)
    file["token_uri"] = "http://oauth.example/token"
    assert "oauth.example:80 would have to be asked over https" in await world.refusal(file)
    impersonated = world.google.federation_file({"file": "/nowhere"})
    url = "http://iam.example/v1/projects/-/serviceAccounts/a@b:generateAccessToken"
    impersonated["service_account_impersonation_url"] = url
    assert "iam.example:80 would have to be asked over https" in await world.refusal(impersonated)


# Federation.


async def test_federation_with_a_token_in_a_file(world: World, tmp_path: Path) -> None:
    world.google.grants.add((WORKLOAD, OTHER))
    (tmp_path / "token").write_text(world.google.kubernetes_token(f"https:{POOL}"))
    file = world.google.federation_file({"file": str(tmp_path / "token")}, OTHER)
    assert (await world.claims(file))["email"] == OTHER
    assert [request.service for request in world.google.requests] == ["sts", "iam"]


async def test_federation_with_a_token_from_a_url(world: World) -> None:
    world.google.grants.add((WORKLOAD, OTHER))
    source = {
        "url": f"{world.google.url}/subject",
        "headers": {"Authorization": "Bearer of-the-job-itself"},
        "format": {"type": "json", "subject_token_field_name": "value"},
    }
    assert (await world.claims(world.google.federation_file(source, OTHER)))["email"] == OTHER
    assert [request.service for request in world.google.requests] == ["subject", "sts", "iam"]


@pytest.mark.shows_secret  # the executable's output is the token
async def test_federation_with_a_token_from_an_executable(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.google.grants.add((WORKLOAD, OTHER))
    answer = {
        "version": 1,
        "success": True,
        "token_type": "urn:ietf:params:oauth:token-type:jwt",
        "id_token": world.google.kubernetes_token(f"https:{POOL}"),
        "expiration_time": 4_000_000_000,
    }
    (tmp_path / "answer").write_text(json.dumps(answer))
    source = {"executable": {"command": f"cat {tmp_path / 'answer'}", "timeout_millis": 5000}}
    file = world.google.federation_file(source, OTHER)
    monkeypatch.delenv("GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES", raising=False)
    assert "GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES=1" in await world.refusal(file)
    monkeypatch.setenv("GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES", "1")
    assert (await world.claims(file))["email"] == OTHER
    (tmp_path / "answer").write_text("no JSON")
    assert "its executable gave no subject token" in await world.refusal(file)


async def test_federation_of_aws(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.google.grants.add((AWS_ROLE, OTHER))
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", world.google.secret("AKIAIOSFODNN7EXAMPLE"))
    monkeypatch.setenv(
        "AWS_SECRET_ACCESS_KEY", world.google.secret("wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY")
    )
    source = {
        "environment_id": "aws1",
        "regional_cred_verification_url": "https://sts.{region}.amazonaws.com?Action=GetCallerIdentity",
    }
    file = world.google.federation_file(source, OTHER) | {"subject_token_type": AWS_TYPE}
    assert (await world.claims(file))["email"] == OTHER
    assert [request.service for request in world.google.requests] == ["sts", "iam"]


async def test_federation_without_an_account(world: World, tmp_path: Path) -> None:
    world.google.grants.add((WORKLOAD, OTHER))
    (tmp_path / "token").write_text(world.google.kubernetes_token(f"https:{POOL}"))
    file = world.google.federation_file({"file": str(tmp_path / "token")})
    assert "external_account has none of its own; set HBONE_TOKEN_ACCOUNT" in await world.refusal(file)
    assert (await world.claims(file, service_account=OTHER))["email"] == OTHER


async def test_federation_keeps_its_access_token(world: World, tmp_path: Path) -> None:
    world.google.grants.add((WORKLOAD, OTHER))
    (tmp_path / "token").write_text(world.google.kubernetes_token(f"https:{POOL}"))
    minter = world.credentials(world.google.federation_file({"file": str(tmp_path / "token")}, OTHER))
    await asyncio.gather(*(minter.mint(f"https://{number}.example") for number in range(10)))
    assert len(world.google.asked("sts")) == 1
    assert len(world.google.asked("iam")) == 10


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"file": "/nowhere/token"}, "no subject token could be read from /nowhere/token"),
        ({"file": 5}, "it has none of file, url, executable, environment_id"),
        ({"file": "/nowhere", "url": 5}, "a value that is no text in url"),
        ({"executable": {"command": "true", "output_file": 5}}, "a value that is no text in executable"),
        ({"executable": {"timeout_millis": 5}}, "external_account with a missing or wrong field"),
        ({}, "it has none of file"),
        ("text", "it has none of file"),
        (None, "it has none of file"),
        ({"environment_id": "azure"}, "external_account with a missing or wrong field"),
        ({"url": "http://ci.example/token"}, "ci.example:80 would have to be asked over https"),
        ({"certificate": {"certificate_config_location": "/nowhere"}}, "it has none of file"),
    ],
)
async def test_federation_with_a_wrong_source(world: World, source: Any, says: str) -> None:
    assert says in await world.refusal(world.google.federation_file(source, OTHER))
    assert world.google.requests == []


async def test_federation_with_a_token_that_sts_does_not_take(world: World, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(world.google.kubernetes_token("somebody else"))
    text = await world.refusal(world.google.federation_file({"file": str(tmp_path / "token")}, OTHER))
    assert text.endswith(f"{world.google.url[8:]} answered 400 (invalid_grant)")


# A user.


async def test_a_user_has_tokens_for_no_other_audience(world: World) -> None:
    text = await world.refusal(world.google.user_file(USER))
    assert text == (
        f"no ID token for {AUDIENCE} with credentials file {world.file}: a user's login gives one for its "
        "own client only; set HBONE_TOKEN_ACCOUNT (service_account in hgate's file) to a service account to "
        "impersonate"
    )
    assert world.google.requests == []


async def test_a_user_has_tokens_for_its_own_client(world: World) -> None:
    file = world.google.user_file(USER)
    minted = await world.credentials(file).mint(file["client_id"])
    assert world.google.claims(minted.token, file["client_id"])["sub"] == USER


async def test_a_user_who_impersonates(world: World) -> None:
    world.google.grants.add((USER, OTHER))
    minter = world.credentials(world.google.user_file(USER), service_account=OTHER)
    minted = await minter.mint(AUDIENCE)
    assert world.google.claims(minted.token, AUDIENCE)["email"] == OTHER
    assert minter.identity == f"{OTHER} by credentials file {world.file}"


async def test_a_user_of_a_workforce_pool(world: World) -> None:
    world.google.grants.add((USER, OTHER))
    file = world.google.workforce_file(USER)
    assert "external_account_authorized_user has none of its own" in await world.refusal(file)
    assert (await world.claims(file, service_account=OTHER))["email"] == OTHER


async def test_a_user_whose_login_has_ended(world: World) -> None:
    file = world.google.user_file(USER)
    file["refresh_token"] = world.google.secret("1//an-old-refresh-token")
    text = await world.refusal(file, service_account=OTHER)
    assert text.endswith(f"{world.google.url[8:]} answered 400 (invalid_grant)")


# The file.


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "it is no JSON"),
        ("[]", "it is no JSON object"),
        ("{}", "its type is none, not one of service_account"),
        ('{"type": "gdch_service_account"}', "its type is gdch_service_account, not one of"),
        (" " * 70_000, "it is longer than 65536 bytes"),
    ],
)
async def test_a_file_that_is_none(world: World, content: str, says: str) -> None:
    assert says in await world.refusal(content)


async def test_a_file_that_cannot_be_read(world: World, tmp_path: Path) -> None:
    minter = world.credentials("")
    world.file.unlink()
    with pytest.raises(TokenError, match=r"cannot read credentials file .*: No such file"):
        await minter.mint(AUDIENCE)
    os.mkfifo(world.file, stat.S_IRUSR)
    with pytest.raises(TokenError, match="it is a named pipe, not a regular file"):
        await minter.mint(AUDIENCE)


# Faults of the services.


@pytest.mark.parametrize("service", ["oauth", "iam"])
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Answer(b"<html>proxy login</html>", 200), ("without a token", "is no JSON object")),
        (Answer(b"<html>502 SECRET-SECRET</html>", 502), ("answered 502",)),
        (Answer(b'{"error": "SECRET-SECRET"}', 400), ("answered 400",)),
        (Answer(b'{"error": {"status": 7}}', 418), ("answered 418",)),
        (Answer(b"[1, 2]", 200), ("without a token", "is no JSON object")),
        (Answer(b"null", 200), ("without a token", "is no JSON object")),
        (Answer(b"{}", 200), ("without a token", "its answer has none")),
        (Answer(b'{"id_token": 5, "token": 5}', 200), ("no token",)),
        (Answer(b'{"id_token": "a.b.c", "token": "a.b.c"}', 200), ("no token",)),
        (Answer(b"x" * 100_000, 200), ("is longer than 65536 bytes",)),
        (Answer(raw=b"\x00\x01SECRET-SECRET\r\n\r\n"), ("broken answer",)),
        (Answer(raw=b""), ("broken answer",)),
        (Answer(b"[" * 60_000, 200), ("without a token", "is no JSON object")),
        (Answer(b"\xff\xfe", 200), ("without a token", "is no JSON object")),
    ],
)
async def test_an_answer_that_is_none(
    world: World, service: str, answer: Answer, says: tuple[str, ...]
) -> None:
    world.google.secret("SECRET-SECRET")
    world.google.grants.add((OWN, OTHER))
    world.google.faults[service] = answer
    account = OTHER if service == "iam" else ""
    text = await world.refusal(world.google.service_account_file(OWN), service_account=account)
    assert any(part in text for part in says), text


@pytest.mark.parametrize(
    "answer",
    [
        b'{"access_token": "ya29.SECRET", "expires_in": "soon"}',
        b'{"access_token": "ya29.SECRET", "expires_in": -5}',
        b'{"access_token": "ya29.SECRET", "expires_in": 1e300}',
        b'{"access_token": "ya29.SECRET"}',
        b'{"access_token": ["ya29.SECRET"], "expires_in": 60}',
        b'{"access_token": "ya29.SECRET\\n", "expires_in": 60}',
        b'{"expires_in": 60}',
    ],
)
async def test_an_access_token_that_is_none(world: World, answer: bytes) -> None:
    world.google.secret("ya29.SECRET-SECRET")
    world.google.faults["oauth"] = Answer(answer)
    text = await world.refusal(world.google.service_account_file(OWN), service_account=OTHER)
    assert "SECRET" not in text
    assert world.google.asked("iam") == []


by_either_service = pytest.mark.parametrize("account", ["", OTHER], ids=["oauth", "iam"])


@by_either_service
async def test_a_token_for_somebody_else(world: World, account: str) -> None:
    world.google.grants.add((OWN, OTHER))
    world.google.audience = "https://elsewhere.example"
    text = await world.refusal(world.google.service_account_file(OWN), service_account=account)
    assert text.endswith(f"it is for https://elsewhere.example, not for {AUDIENCE}")


@by_either_service
async def test_a_token_that_has_expired(world: World, account: str) -> None:
    world.google.grants.add((OWN, OTHER))
    world.google.lifetime_s = -60
    text = await world.refusal(world.google.service_account_file(OWN), service_account=account)
    assert re.search(r": it expired 6\d s ago; is the clock right\?$", text)


async def test_nobody_there(world: World) -> None:
    file = world.google.service_account_file(OWN)
    file["token_uri"] = f"https://127.0.0.1:{(port := closed_port())}/token"
    assert f"cannot connect to 127.0.0.1:{port}: " in await world.refusal(file)


async def test_a_service_that_is_not_trusted(world: World) -> None:
    world.write(world.google.service_account_file(OWN))
    minter = GoogleCredentials(world.google.settings(credentials=world.file))
    with pytest.raises(TokenError, match="certificate refused: "):
        await minter.mint(AUDIENCE)


async def test_a_service_that_does_not_answer(world: World) -> None:
    world.google.closed.add("oauth")
    text = await world.refusal(world.google.service_account_file(OWN), step_timeout_s=0.2)
    assert text.endswith(f"no complete answer from {world.google.url[8:]} within 0.2 s")


async def test_who_gives_up_is_in_nobodys_way(world: World) -> None:
    world.google.closed.add("oauth")
    minter = world.credentials(world.google.service_account_file(OWN), step_timeout_s=60)
    asking = [spawn(minter.mint(f"https://{number}.example"), name="asks") for number in range(4)]
    await world.google.seen(4)
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)
    world.google.closed.clear()
    async with asyncio.timeout(PATIENCE_S):
        await minter.mint(AUDIENCE)


async def test_nothing_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    world.google.grants.add((OWN, OTHER))
    await world.claims(world.google.service_account_file(OWN), service_account=OTHER)
    await world.refusal(world.google.service_account_file(OTHER), service_account=OWN)
    assert world.google.found_in(caplog.text) == []

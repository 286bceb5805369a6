"""Tokens of the gcloud command, and what its configuration says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shared.credentials.token_sources.gcloud import CLIENT, GcloudAccess, GcloudConfig, GcloudMinter
from shared.credentials.token_sources.minters import minter_from_env
from shared.credentials.token_sources.token_settings import TokenSettings, from_env
from shared.errors import OwnClientError, TokenError, UsageError
from tests.support.gcloud_command import GcloudCommand
from tests.support.metadata_server import closed_port, unsigned_token

AUDIENCE = "https://hello.a.run.app"
pytestmark = pytest.mark.shows_secret  # that is what gcloud is asked for

ROBOT = "robot@proj.iam.gserviceaccount.com"
FAR = 4102444800


@pytest.fixture
def gcloud(tmp_path: Path) -> GcloudCommand:
    return GcloudCommand(tmp_path)


def minter(gcloud: GcloudCommand, timeout_s: float = 10.0, **settings: str) -> GcloudMinter:
    told = replace(from_env(gcloud.environ), **settings)  # type: ignore[arg-type]
    return GcloudMinter(gcloud.program, told, GcloudConfig(gcloud.environ, told), timeout_s=timeout_s)


async def test_a_person_has_tokens_for_gcloud_only(gcloud: GcloudCommand) -> None:
    gcloud.prints(identity=(token := unsigned_token(aud=CLIENT, exp=FAR)))
    with pytest.raises(OwnClientError, match=r"example[.]com: a person's login") as caught:
        await minter(gcloud).mint(AUDIENCE)
    assert (caught.value.client, gcloud.asked) == (CLIENT, [])
    minted = await minter(gcloud).mint(CLIENT)
    assert (minted.token, minted.expires_at_s) == (token, FAR)
    assert gcloud.asked == ["auth print-identity-token --quiet prompts=1 alone=yes"]


async def test_a_service_account_has_them_for_any_audience(gcloud: GcloudCommand) -> None:
    gcloud.configure(account=ROBOT)
    gcloud.prints(identity=unsigned_token(aud=AUDIENCE, exp=FAR))
    await minter(gcloud).mint(AUDIENCE)
    assert gcloud.asked[0].startswith(f"auth print-identity-token --quiet --audiences={AUDIENCE} prompts")


async def test_a_person_impersonates(gcloud: GcloudCommand) -> None:
    gcloud.prints(identity=unsigned_token(aud=AUDIENCE, exp=FAR))
    source = minter(gcloud, service_account=ROBOT)
    await source.mint(AUDIENCE)
    assert source.identity == f"{ROBOT} by gcloud"
    assert f"--impersonate-service-account={ROBOT} --include-email" in gcloud.asked[0]


async def test_what_goes_wrong(gcloud: GcloudCommand) -> None:
    gcloud.prints(identity="<html>")
    with pytest.raises(TokenError, match=r"me@example[.]com: what it gave is no JWT"):
        await minter(gcloud).mint(CLIENT)
    gcloud.prints(identity="two words")
    with pytest.raises(TokenError, match="cannot use what gcloud auth print-identity-token printed"):
        await minter(gcloud).mint(CLIENT)
    gcloud.does("fail")
    with pytest.raises(TokenError, match=r"ended with exit code 1; run it by hand to see why$"):
        await minter(gcloud).mint(CLIENT)
    gcloud.does("hang")
    with pytest.raises(TokenError, match=r"has not ended within 0\.2 s"):
        await minter(gcloud, timeout_s=0.2).mint(CLIENT)


async def test_access_tokens(gcloud: GcloudCommand) -> None:
    gcloud.prints(access="ya29.x")
    access = GcloudAccess(gcloud.program, GcloudConfig(gcloud.environ, from_env(gcloud.environ)))
    assert access.identity == "gcloud's me@example.com"
    assert (await access.access_token()).token == "ya29.x"
    await access.access_token()
    assert len(gcloud.asked) == 1, "it is kept"


# Which source `auto` is.


async def test_auto_is_gcloud_for_people_only(gcloud: GcloudCommand) -> None:
    gcloud.prints(identity=unsigned_token(aud=CLIENT, exp=FAR))
    nowhere = {"GCE_METADATA_HOST": f"127.0.0.1:{closed_port()}"}
    with pytest.raises(TokenError, match="no metadata server"):
        await minter_from_env({**gcloud.environ, **nowhere}, for_people=True).mint(CLIENT)
    with pytest.raises(UsageError, match="HBONE_TOKENS=gcloud: there is no gcloud in PATH"):
        minter_from_env({"PATH": "/nonexistent", "HBONE_TOKENS": "gcloud"})
    of_people = minter_from_env({**gcloud.environ, "HBONE_TOKENS": "gcloud"})
    await of_people.mint(CLIENT)
    assert of_people.identity == "gcloud's me@example.com"


@pytest.mark.parametrize(
    ("kind", "asked"), [("authorized_user", True), ("service_account", False), (None, True)]
)
async def test_a_person_s_file_gives_way_to_the_command(
    gcloud: GcloudCommand, kind: str | None, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shared.credentials.token_sources import minters

    async def absent(host: str) -> str:
        return "no metadata server"

    monkeypatch.setattr(minters, "absence_of_metadata", absent)
    gcloud.prints(identity=unsigned_token(aud=CLIENT, exp=FAR))
    if kind is not None:
        needed = ("client_id", "client_secret", "refresh_token", "client_email", "private_key")
        info = {"type": kind, "token_uri": "https://127.0.0.1:1/", **dict.fromkeys(needed, "x")}
        (gcloud.config / "application_default_credentials.json").write_text(json.dumps(info))
    source = minter_from_env(gcloud.environ, for_people=True)
    if asked:
        await source.mint(CLIENT)
        assert source.identity == "gcloud's me@example.com"
    else:
        with pytest.raises(TokenError, match="credentials file"):
            await source.mint(AUDIENCE)
    assert bool(gcloud.asked) is asked


# The configuration.


def test_variables_go_over_the_file(gcloud: GcloudCommand) -> None:
    told = from_env(gcloud.environ)
    of_file = GcloudConfig(gcloud.environ, told)
    assert (of_file.account, of_file.project, of_file.region) == ("me@example.com", "proj", "")
    said = {"CLOUDSDK_CORE_PROJECT": "other", "CLOUDSDK_RUN_REGION": "europe-west1"}
    of_variables = GcloudConfig({**gcloud.environ, **said}, told)
    assert (of_variables.project, of_variables.region) == ("other", "europe-west1")
    another = GcloudConfig({**gcloud.environ, "CLOUDSDK_ACTIVE_CONFIG_NAME": "none"}, told)
    assert (another.account, another.files()[1].name) == ("", "config_none")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"no section", b"[core]\naccount", b"[core]\n[core]\n"])
def test_a_malformed_configuration_says_nothing(gcloud: GcloudCommand, content: bytes) -> None:
    gcloud.config.joinpath("configurations/config_work").write_bytes(content)
    assert GcloudConfig(gcloud.environ, from_env(gcloud.environ)).account == ""


def test_no_home_has_no_configuration() -> None:
    config = GcloudConfig({}, TokenSettings())
    assert (config.account, config.files()) == ("", [])

"""Which source of tokens is taken, by settings and by what the machine has."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.credentials.token_sources.gke_exchange import GkeExchange
from shared.credentials.token_sources.google_credentials import GoogleCredentials
from shared.credentials.token_sources.impersonation import Impersonated
from shared.credentials.token_sources.metadata import MetadataMinter
from shared.credentials.token_sources.minters import AutomaticMinter, absence_of_metadata, make_minter
from shared.credentials.token_sources.token_settings import TokenSettings
from shared.credentials.tokens.minting import Minted, Minter
from shared.errors import TokenError, UsageError
from tests.support.google import Google
from tests.support.google_services import DATA_PLANE, MACHINE, WORKLOAD
from tests.support.metadata_server import Answer, closed_port

AUDIENCE = "https://hello.example"
OWN = "own@proj.iam.gserviceaccount.com"
OTHER = "other@proj.iam.gserviceaccount.com"


@pytest.fixture
def google(google: Google) -> Google:
    google.grants |= {(WORKLOAD, DATA_PLANE), (MACHINE, OTHER), (OWN, OTHER)}
    return google


async def owner(google: Google, minter: Minter) -> str:
    """Whose token it is."""
    minted = await minter.mint(AUDIENCE)
    return str(google.claims(minted.token, AUDIENCE)["sub"])


async def never(audience: str) -> Minted:
    raise AssertionError("nobody should ask for a Kubernetes token")


# What is set.


async def test_the_metadata_server(google: Google) -> None:
    minter = make_minter(google.settings(source="metadata"))
    assert isinstance(minter, MetadataMinter)
    assert await owner(google, minter) == MACHINE


async def test_the_metadata_server_and_another_account(google: Google) -> None:
    minter = make_minter(google.settings(source="metadata", service_account=OTHER), tls=google.tls)
    assert isinstance(minter, Impersonated)
    assert minter.identity == f"{OTHER} by metadata server at {google.metadata_host}"
    assert await owner(google, minter) == OTHER


async def test_credentials_in_a_file(google: Google, tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    file.write_text(json.dumps(google.service_account_file(OWN)))
    minter = make_minter(google.settings(source="google", gcloud=file), tls=google.tls)
    assert isinstance(minter, GoogleCredentials)
    assert await owner(google, minter) == OWN


async def test_the_exchange_on_gke(google: Google, tmp_path: Path) -> None:
    file = tmp_path / "token"
    minter = make_minter(google.settings(source="gke", subject_token=file), tls=google.tls)
    assert isinstance(minter, GkeExchange)
    file.write_text(google.kubernetes_token())
    assert await owner(google, minter) == DATA_PLANE


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, "HBONE_SUBJECT_TOKEN"),
        ({"cluster_name": "", "project_number": ""}, "CLUSTER_NAME, PROJECT_NUMBER, HBONE_SUBJECT_TOKEN"),
        (
            {"project_id": "", "project_number": "", "service_account": OTHER},
            "PROJECT_ID, HBONE_SUBJECT_TOKEN",
        ),
    ],
)
def test_what_the_exchange_needs(changes: dict[str, Any], missing: str) -> None:
    whole = TokenSettings(
        source="gke", project_id="p", project_number="1", cluster_name="c", cluster_location="l"
    )
    with pytest.raises(UsageError, match=f"^no token exchange on GKE without {missing}, or"):
        make_minter(replace(whole, **changes))


# What the machine has.


async def test_credentials_that_are_named_come_first(google: Google, tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    file.write_text(json.dumps(google.service_account_file(OWN)))
    minter = make_minter(google.settings(credentials=file), subject_token=never, tls=google.tls)
    assert minter.identity == f"credentials file {file}"
    assert await owner(google, minter) == OWN


async def test_the_exchange_comes_before_the_metadata_server(google: Google, tmp_path: Path) -> None:
    file = tmp_path / "token"
    minter = make_minter(google.settings(subject_token=file), tls=google.tls)
    file.write_text(google.kubernetes_token())
    assert minter.identity == f"{DATA_PLANE} by the workload in proj.svc.id.goog"
    assert await owner(google, minter) == DATA_PLANE


async def test_an_exchange_that_lacks_its_token_is_not_chosen(google: Google, tmp_path: Path) -> None:
    minter = make_minter(google.settings(subject_token=tmp_path / "token"))
    assert await owner(google, minter) == MACHINE


async def test_a_metadata_server_that_is_named_is_not_tried_out(google: Google) -> None:
    minter = make_minter(google.settings())
    assert await owner(google, minter) == MACHINE
    assert len(google.requests) == 1


def unnamed(
    google: Google, host: str = "", *, probe_again_s: float = 60, **changes: object
) -> AutomaticMinter:
    """`auto` where the metadata server, at `host` or the tests' own, is one that nobody has named."""
    settings = google.settings(project_number="", metadata_host=host or google.metadata_host, **changes)
    return AutomaticMinter(
        settings, tls=google.tls, usual_host=settings.metadata_host, probe_again_s=probe_again_s
    )


async def test_the_metadata_server_is_tried_out_once(google: Google) -> None:
    minter = unnamed(google)
    assert minter.identity == f"metadata server at {google.metadata_host}"
    for _ in range(2):
        assert await owner(google, minter) == MACHINE
    assert google.requests[0].path == "/"
    assert len(google.requests) == 3


async def test_gclouds_credentials_come_last(google: Google, tmp_path: Path) -> None:
    file = tmp_path / "adc.json"
    file.write_text(json.dumps(google.service_account_file(OWN)))
    minter = unnamed(google, f"127.0.0.1:{closed_port()}", gcloud=file)
    assert await owner(google, minter) == OWN
    assert minter.identity == f"credentials file {file}"


async def test_a_metadata_server_that_is_absent_is_not_asked_again_at_once(google: Google) -> None:
    minter = unnamed(google)
    google.faults["metadata"] = Answer(b"starting", 503)
    for _ in range(2):
        with pytest.raises(TokenError, match="what answers at 127"):
            await minter.mint(AUDIENCE)
    assert len(google.requests) == 1


async def test_a_metadata_server_that_comes_up_later(google: Google) -> None:
    minter = unnamed(google, probe_again_s=0)
    google.faults["metadata"] = Answer(b"starting", 503)
    with pytest.raises(TokenError, match="what answers at 127"):
        await minter.mint(AUDIENCE)
    google.faults.clear()
    assert await owner(google, minter) == MACHINE


async def test_nothing_at_all(google: Google, tmp_path: Path) -> None:
    host = f"127.0.0.1:{closed_port()}"
    with pytest.raises(TokenError) as caught:
        await unnamed(google, host, gcloud=tmp_path / "adc.json").mint(AUDIENCE)
    text = str(caught.value)
    assert text.startswith(
        "no source of ID tokens: GOOGLE_APPLICATION_CREDENTIALS is not set; no exchange on GKE: "
        f"PROJECT_NUMBER, HBONE_SUBJECT_TOKEN not set; no metadata server: cannot connect to {host}: "
    )
    assert text.endswith(f"; no login of gcloud's: no {tmp_path / 'adc.json'}")


async def test_who_has_set_nothing_of_gke_hears_nothing_of_it() -> None:
    host = f"127.0.0.1:{closed_port()}"
    minter = AutomaticMinter(TokenSettings(metadata_host=host), usual_host=host)
    with pytest.raises(
        TokenError, match=r"is not set; no metadata server: .*; no login of gcloud's: no home"
    ):
        await minter.mint(AUDIENCE)


async def test_a_place_that_cannot_be_looked_into(google: Google) -> None:
    """As with a HOME of somebody else's; here it is a name that no file system has."""
    nowhere = Path("/", "x" * 300, "adc.json")
    minter = unnamed(google, f"127.0.0.1:{closed_port()}", gcloud=nowhere)
    with pytest.raises(TokenError, match="no login of gcloud's: no /xxx"):
        await minter.mint(AUDIENCE)
    assert await owner(google, make_minter(google.settings(subject_token=nowhere))) == MACHINE


async def test_a_captive_portal_is_no_metadata_server(google: Google) -> None:
    assert await absence_of_metadata(google.metadata_host) == ""
    google.faults["metadata"] = Answer(b"<html>please log in</html>")
    assert "what answers at" in await absence_of_metadata(google.metadata_host)
    google.closed.add("metadata")
    assert "within 0.05 s" in await absence_of_metadata(google.metadata_host, 0.05)


@pytest.mark.parametrize(
    ("program", "imported"),
    [
        ("make_minter(TokenSettings(source='metadata')); make_minter(TokenSettings()).identity", False),
        ("make_minter(TokenSettings(credentials=Path('/nowhere')))", True),
    ],
    ids=["what is not chosen is not", "what is chosen already is, before the first tunnel"],
)
def test_what_is_imported(program: str, imported: bool) -> None:
    whole = (
        "import sys; from pathlib import Path; "
        "from shared.credentials.token_sources.minters import make_minter; "
        "from shared.credentials.token_sources.token_settings import TokenSettings; "
        f"{program}; print([name for name in sys.modules if name.startswith('google') or 'gke' in name])"
    )
    answer = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True)
    assert ("'google.auth'" in answer.stdout) is imported
    assert imported or answer.stdout == "[]\n"

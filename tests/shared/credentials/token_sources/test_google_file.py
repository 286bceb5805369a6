"""Which files with Google's credentials are taken; `test_google_credentials` has most of them in use."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.credentials.token_sources import google_file
from shared.credentials.token_sources.google_file import NEEDED, Credentials, Impersonation
from shared.credentials.token_sources.token_settings import TokenSettings
from shared.errors import TokenError

ACCOUNT = "own@proj.iam.gserviceaccount.com"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def test_where_the_file_is(tmp_path: Path) -> None:
    own, gcloud = tmp_path / "own.json", tmp_path / "gcloud.json"
    assert google_file.find(TokenSettings(credentials=own, gcloud=gcloud)) == own
    with pytest.raises(TokenError, match=r"and there is no .*gcloud\.json"):
        google_file.find(TokenSettings(gcloud=gcloud))
    with pytest.raises(TokenError, match=r"GOOGLE_APPLICATION_CREDENTIALS is not set$"):
        google_file.find(TokenSettings())
    with pytest.raises(TokenError, match="and there is no /xxx"):
        google_file.find(TokenSettings(gcloud=Path("/", "x" * 300)))  # a name that no file system has
    gcloud.touch()
    assert google_file.find(TokenSettings(gcloud=gcloud)) == gcloud


@pytest.mark.parametrize("kind", NEEDED)
def test_what_a_kind_needs(kind: str) -> None:
    whole = {"type": kind, "credential_source": {"file": "/x"}} | dict.fromkeys(NEEDED[kind], "text")
    assert google_file.judged(whole, "it").kind == kind
    for name in NEEDED[kind]:
        for wrong in ("", None, 5, ["text"]):
            with pytest.raises(TokenError, match=f"{kind} without a text {name}"):
                google_file.judged(whole | {name: wrong}, "it")


def test_whom_an_impersonation_names() -> None:
    url = f"https://iam.example/v1/projects/-/serviceAccounts/{ACCOUNT}"
    info = {"service_account_impersonation_url": f"{url}:generateAccessToken", "delegates": ["a"]}
    found = google_file.impersonation(Credentials("external_account", info), "it")
    assert found == Impersonation(ACCOUNT, f"{url}:generateIdToken", ("a",))
    assert google_file.impersonation(Credentials("external_account", {}), "it") is None


def test_credentials_are_not_shown() -> None:
    assert "SECRET" not in repr(Credentials("service_account", {"private_key": "SECRET"}))


@given(
    st.dictionaries(
        st.sampled_from(
            ["type", "credential_source", "delegates", *(n for names in NEEDED.values() for n in names)]
        ),
        VALUES | st.sampled_from([*NEEDED, f"https://h/v1/projects/-/serviceAccounts/{ACCOUNT}"]),
    )
)
def test_any_object_is_taken_or_refused(info: dict[str, object]) -> None:
    try:
        google_file.impersonation(google_file.judged(info, "it"), "it")
    except TokenError as error:
        assert str(error).startswith("cannot use ")
        assert str(error).isprintable()


@given(st.binary(max_size=50) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_content_is_taken_or_refused(content: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        try:
            google_file.read(Path(file.name))
        except TokenError as error:
            assert error.reason == "file"

"""What can be set about tokens, and what is said of a wrong value."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.credentials.token_sources.token_settings import ENVIRONMENT, TokenSettings, from_env
from shared.errors import UsageError

POOL = "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/x"


def test_an_empty_environment_gives_the_defaults() -> None:
    assert from_env({}) == TokenSettings()
    assert from_env({name: " " for name in ENVIRONMENT}) == TokenSettings()


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("HBONE_TOKENS", "GKE", "source", "gke"),
        ("HBONE_TOKEN_ACCOUNT", "a-b@p.example", "service_account", "a-b@p.example"),
        ("HBONE_TOKEN_STEP_TIMEOUT", "0.5", "step_timeout_s", 0.5),
        ("HBONE_SUBJECT_TOKEN", "/var/token", "subject_token", Path("/var/token")),
        ("HBONE_STS_AUDIENCE", POOL, "sts_audience", POOL),
        ("HBONE_STS_URL", "https://sts.example/v1/token", "sts_url", "https://sts.example/v1/token"),
        ("HBONE_IAM_URL", "http://127.0.0.1:80/", "iam_url", "http://127.0.0.1:80"),
        ("HBONE_OAUTH_URL", "http://[::1]:80/token", "oauth_url", "http://[::1]:80/token"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/key.json", "credentials", Path("/key.json")),
        ("CLOUDSDK_CONFIG", "/gcloud", "gcloud", Path("/gcloud/application_default_credentials.json")),
        ("GCE_METADATA_HOST", "169.254.169.254", "metadata_host", "169.254.169.254"),
        ("GCE_METADATA_TIMEOUT", "1", "metadata_timeout_s", 1.0),
        ("PROJECT_ID", "example.com:proj-1", "project_id", "example.com:proj-1"),
        ("PROJECT_NUMBER", "42", "project_number", "42"),
        ("CLUSTER_NAME", "clu", "cluster_name", "clu"),
        ("CLUSTER_LOCATION", "europe-west1-b", "cluster_location", "europe-west1-b"),
    ],
)  # fmt: skip
def test_each_variable_sets_its_field(name: str, text: str, field: str, value: object) -> None:
    assert getattr(from_env({name: text}), field) == value


def test_gclouds_folder_is_in_the_home_folder() -> None:
    found = from_env({"HOME": "/home/me"}).gcloud
    assert found == Path("/home/me/.config/gcloud/application_default_credentials.json")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("HBONE_TOKENS", "x", "=x (must be auto, metadata, google, gke or gcloud)"),
        ("HBONE_TOKEN_ACCOUNT", "x", "=x (has to be a service account's e-mail address)"),
        ("HBONE_TOKEN_ACCOUNT", "a@b/c?d", "=a@b/c?d (has to be a service account's e-mail address)"),
        ("HBONE_TOKEN_STEP_TIMEOUT", "soon", "=soon (must be a duration such as 10s, 500ms or 5m)"),
        ("HBONE_TOKEN_STEP_TIMEOUT", "0", "=0 (must be between 0.1s and 60s)"),
        ("HBONE_TOKEN_STEP_TIMEOUT", "nan", "=nan (must be a duration such as 10s, 500ms or 5m)"),
        ("HBONE_TOKEN_STEP_TIMEOUT", "61", "=61 (must be between 0.1s and 60s)"),
        ("HBONE_STS_AUDIENCE", "https://x", "=https://x (begins with //iam.googleapis.com/ or i"),
        ("GCE_METADATA_HOST", "http://metadata", "=http://metadata (has to be HOST or HOST:PORT)"),
        ("GCE_METADATA_HOST", "host/x", "=host/x (has to be HOST or HOST:PORT)"),
        ("PROJECT_ID", "a/x", "=a/x (has to be a name"),
        ("PROJECT_ID", "a\nb", "='a\\nb' (has to be a name"),
        ("PROJECT_NUMBER", "x" * 70, f"={'x' * 60}... (has to be a number)"),
        ("CLUSTER_NAME", "a b", "=a b (has to be a name"),
        ("HBONE_SUBJECT_TOKEN", "eyJhbGciOiJSUzI1NiJ9.x.x", " (has to be a file's path; "),
        ("GOOGLE_APPLICATION_CREDENTIALS", '{"private_key": "x"}', " (has to be a file's path; "),
        ("HBONE_STS_URL", "http://sts.example/x", " (has to be https"),
        ("HBONE_STS_URL", "https://me:x@sts.example/", " (URL with a user name)"),
        ("HBONE_STS_URL", "https://me:x/", " (URL that cannot be read)"),
        ("HBONE_IAM_URL", "https://iam.example/?key=x", " (URL with a query or fragment)"),
        ("HBONE_IAM_URL", "ftp://iam.example/x", " (URL with scheme 'ftp' instead of http or https)"),
        ("HBONE_OAUTH_URL", "x", " (URL with scheme '' instead of http or https)"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_and_shown_unless_it_may_be_a_secret(name: str, text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_env({name: text})
    assert str(caught.value).startswith(f"invalid {name}{says}")


@given(st.sampled_from(sorted(ENVIRONMENT)), st.text())
def test_any_value_is_taken_or_refused(name: str, text: str) -> None:
    try:
        from_env({name: text})
    except UsageError as error:
        assert str(error).isprintable()


def test_the_environment_goes_over_what_it_is_given() -> None:
    file = TokenSettings(source="gke", project_id="of-the-file", cluster_name="clu")
    assert from_env({"PROJECT_ID": "of-the-environment"}, file) == TokenSettings(
        source="gke", project_id="of-the-environment", cluster_name="clu"
    )


def test_whom_the_exchange_is_for() -> None:
    cluster = TokenSettings(project_id="p", project_number="42", cluster_name="c", cluster_location="l")
    url = "https://container.googleapis.com/v1/projects/p/locations/l/clusters/c"
    assert cluster.exchange_audience == f"identitynamespace:p.svc.id.goog:{url}"
    assert cluster.subject_audience == "p.svc.id.goog"
    assert cluster.exchange_account == "service-42@gcp-sa-meshdataplane.iam.gserviceaccount.com"
    pool = TokenSettings(project_id="p", sts_audience=POOL, service_account="a@b")
    assert (pool.exchange_audience, pool.subject_audience) == (POOL, f"https:{POOL}")
    assert pool.exchange_account == "a@b"
    fleet = TokenSettings(sts_audience="identitynamespace:f.svc.id.goog:https://gkehub.googleapis.com/x")
    assert fleet.subject_audience == "f.svc.id.goog"
    for nothing in (TokenSettings(), TokenSettings(project_id="p", cluster_name="c")):
        assert (nothing.exchange_audience, nothing.subject_audience, nothing.exchange_account) == ("", "", "")

"""Tokens of the pod's own service account, asked for with the one that every pod has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from shared.credentials.kubernetes import kubernetes_names
from shared.credentials.token_sources.minters import minter_from_env
from shared.credentials.token_sources.pod_tokens import PodTokens, account_of, pod_tokens
from shared.credentials.token_sources.token_settings import TokenSettings
from shared.errors import TokenError, UsageError
from tests.support.api_server import NAMESPACE, SERVICE_ACCOUNT, LocalApiServer
from tests.support.metadata_server import unsigned_token

AUDIENCE = "proj.svc.id.goog"
OWN = unsigned_token(sub=f"system:serviceaccount:{NAMESPACE}:{SERVICE_ACCOUNT}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pod's."""
    monkeypatch.setattr(kubernetes_names, "SERVICE_ACCOUNT_FOLDER", tmp_path)
    (tmp_path / "token").write_text(OWN)
    return tmp_path


@pytest.fixture
async def cluster(folder: Path) -> AsyncIterator[LocalApiServer]:
    async with LocalApiServer(users={OWN: "pod"}, may_create={("pod", NAMESPACE)}) as server:
        (folder / "ca.crt").write_bytes(server.ca_pem)
        yield server


def pod(cluster: LocalApiServer) -> PodTokens:
    url = urlsplit(cluster.url)
    environ = {"KUBERNETES_SERVICE_HOST": str(url.hostname), "KUBERNETES_SERVICE_PORT": str(url.port)}
    found = pod_tokens(environ, 5.0)
    assert found is not None
    return found


async def test_a_token_of_its_own_account(cluster: LocalApiServer) -> None:
    minter = pod(cluster)
    minted = await minter.mint(AUDIENCE)
    claims = await cluster.verify(minted.token, AUDIENCE)
    assert claims["sub"] == f"system:serviceaccount:{NAMESPACE}:{SERVICE_ACCOUNT}"
    assert minter.identity == f"the pod's service account at {cluster.url}"


async def test_what_a_pod_needs_for_it(cluster: LocalApiServer) -> None:
    cluster.may_create.clear()
    with pytest.raises(TokenError) as caught:
        await pod(cluster).mint(AUDIENCE)
    assert f"verb create on serviceaccounts/token in namespace {NAMESPACE}" in str(caught.value)
    assert caught.value.reason == "refused"


async def test_an_api_server_that_does_not_answer(cluster: LocalApiServer) -> None:
    cluster.gate.clear()
    minter = PodTokens(pod(cluster)._api.access, timeout_s=0.05)
    with pytest.raises(TokenError, match=r"within 0\.05 s") as caught:
        await minter.mint(AUDIENCE)
    assert caught.value.reason == "unreachable"


@pytest.mark.parametrize(
    ("token", "says"),
    [
        ("opaque", "does not tell whose pod this is: no JWT"),
        (unsigned_token(), "it is not of a service account"),
        (unsigned_token(sub="system:node:one"), "it is not of a service account"),
        (unsigned_token(sub=["system:serviceaccount:a:b"]), "it is not of a service account"),
        (unsigned_token(sub="system:serviceaccount:a:b:c"), "it is not of a service account"),
        (unsigned_token(sub="system:serviceaccount:A/:b"), "no name of a namespace"),
        (unsigned_token(sub="system:serviceaccount:a:../b"), "no name of a service account"),
    ],
)
def test_a_token_that_does_not_tell_whose_it_is(token: str, says: str) -> None:
    with pytest.raises(TokenError) as caught:
        account_of(token)
    assert says in str(caught.value)


# When it is asked for.

GKE = {
    "HBONE_TOKENS": "gke",
    "PROJECT_ID": "proj",
    "PROJECT_NUMBER": "42",
    "CLUSTER_NAME": "clu",
    "CLUSTER_LOCATION": "loc",
}
POD = {"KUBERNETES_SERVICE_HOST": "127.0.0.1"}


def test_elsewhere_there_is_none(folder: Path) -> None:
    assert pod_tokens({}, 5.0) is None
    with pytest.raises(UsageError, match="without HBONE_SUBJECT_TOKEN"):
        minter_from_env(GKE)


def test_only_for_the_exchange_and_only_without_a_projected_token(folder: Path) -> None:
    (folder / "token").unlink()
    for more in ({"HBONE_SUBJECT_TOKEN": "/nowhere"}, {"HBONE_TOKENS": "auto"}):
        minter_from_env({**GKE, **POD, **more})  # which would say otherwise that the pod has no token
    minter_from_env(GKE | POD | {"HBONE_TOKENS": ""}, TokenSettings(source="metadata"))


def test_a_pod_without_a_token(folder: Path) -> None:
    (folder / "token").unlink()
    with pytest.raises(
        UsageError, match=f"there is no token in {folder}, for it has automountServiceAccountToken"
    ):
        minter_from_env(GKE | POD)

"""Values of Secret Manager and of berglas, encrypted by the test's own services."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.references import SecretVersion, StoredObject
from agent.config.settings import from_env
from agent.mounts.google_secrets import GoogleSecrets, _opened
from shared.credentials.certificates.authority import Authority
from shared.credentials.kubernetes.kubernetes_config import GivenToken
from shared.errors import ConfigError, HboneError, StatusError
from tests.support.gke_server import TOKEN
from tests.support.google_secrets import KEY, GoogleSecretsServer, error
from tests.support.system_trust import system_trusts

STORED = StoredObject("my-bucket", "folder/a b.json", "")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[GoogleSecretsServer]:
    authority = Authority.create("google.example")
    (tmp_path / "trusted.pem").write_bytes(authority.root_pem)
    with system_trusts(tmp_path / "trusted.pem"):
        async with GoogleSecretsServer(authority) as server:
            server.secrets["proj", "db", "latest"] = b"hunter2\xff"
            server.berglas(STORED.bucket, STORED.name, b"old", "1")
            server.berglas(STORED.bucket, STORED.name, b"new \0", "2")
            yield server


def google(server: GoogleSecretsServer, **more: str) -> GoogleSecrets:
    return GoogleSecrets(GivenToken(TOKEN), from_env({**server.settings(), **more}).mounts)


async def test_a_secret_s_version(server: GoogleSecretsServer) -> None:
    value = await google(server, GOOGLE_CLOUD_QUOTA_PROJECT="payer").secret(
        SecretVersion("proj", "db", "latest")
    )
    assert value == b"hunter2\xff"
    assert server.requests == ["/v1/projects/proj/secrets/db/versions/latest:access"]
    assert server.headers["x-goog-user-project"] == "payer"


async def test_what_berglas_has_encrypted(server: GoogleSecretsServer) -> None:
    assert await google(server).stored(STORED) == b"new \0"
    place = "/storage/v1/b/my-bucket/o/folder%2Fa%20b.json"
    assert server.requests == [place, f"{place}?alt=media&generation=2", f"/v1/{KEY}:decrypt"]


async def test_a_generation_of_it(server: GoogleSecretsServer) -> None:
    assert await google(server).stored(StoredObject(STORED.bucket, STORED.name, "1")) == b"old"


async def test_a_key_s_version_is_left_to_cloud_kms(server: GoogleSecretsServer) -> None:
    metadata, content = server.stored[STORED.bucket, STORED.name, "2"]
    server.stored[STORED.bucket, STORED.name, "2"] = (
        {**metadata, "berglas-kms-key": f"{KEY}/cryptoKeyVersions/3"},
        content,
    )
    assert await google(server).stored(STORED) == b"new \0"


async def failing(server: GoogleSecretsServer, source: SecretVersion | StoredObject = STORED) -> HboneError:
    with pytest.raises(HboneError) as caught:
        if isinstance(source, SecretVersion):
            await google(server).secret(source)
        else:
            await google(server).stored(source)
    assert "hunter2" not in str(caught.value), "Google's messages repeat names"
    return caught.value


@pytest.mark.parametrize(
    ("status", "code", "part", "text", "exit_code"),
    [
        (
            403,
            "PERMISSION_DENIED",
            "secrets",
            "Secret Manager answered 403 (PERMISSION_DENIED); the account needs",
            77,
        ),
        (
            400,
            "FAILED_PRECONDITION",
            "secrets",
            "Secret Manager answered 400 (FAILED_PRECONDITION); is that",
            69,
        ),
        (404, "NOT_FOUND", "storage", "Cloud Storage answered 404 (NOT_FOUND); there is no such object", 69),
        (
            403,
            "FORBIDDEN",
            "alt=media",
            "Cloud Storage answered 403 (FORBIDDEN); the account needs the role st",
            77,
        ),
        (
            403,
            "PERMISSION_DENIED",
            "decrypt",
            "Cloud KMS answered 403 (PERMISSION_DENIED); the account needs",
            77,
        ),
        (503, "UNAVAILABLE", "decrypt", "Cloud KMS answered 503 (UNAVAILABLE)", 69),
    ],
)
async def test_refusals_say_what_to_do(
    server: GoogleSecretsServer, status: int, code: str, part: str, text: str, exit_code: int
) -> None:
    server.answer = lambda target: error(status, code) if part in target else None
    source = SecretVersion("proj", "db", "latest") if part == "secrets" else STORED
    found = await failing(server, source)
    assert str(found).startswith(text)
    assert isinstance(found, StatusError) and found.exit_code == exit_code


async def test_one_that_is_encrypted_for_another_name(server: GoogleSecretsServer) -> None:
    server.stored["my-bucket", "other", "1"] = server.stored[STORED.bucket, STORED.name, "2"]
    found = await failing(server, StoredObject("my-bucket", "other", ""))
    assert "for an object of another name" in str(found)


@pytest.mark.parametrize(
    ("metadata", "content", "reason"),
    [
        ({}, b"a:b", "the object is not berglas': its metadata have no berglas-kms-key"),
        ({"berglas-kms-key": "projects/../a"}, b"a:b", "the object is not berglas': its metadata"),
        ({"berglas-kms-key": KEY}, b"hunter2", "the object is not berglas': it has no two parts"),
        ({"berglas-kms-key": KEY}, b"hunter2!:YQ==", "what it has is no base64"),
    ],
)
async def test_what_is_malformed(
    server: GoogleSecretsServer, metadata: dict[str, str], content: bytes, reason: str
) -> None:
    server.stored[STORED.bucket, STORED.name, "2"] = (metadata, content)
    found = await failing(server)
    assert str(found).startswith(f"Cloud Storage: {reason}") and found.exit_code == 78


async def test_one_that_is_damaged(server: GoogleSecretsServer) -> None:
    metadata, content = server.stored[STORED.bucket, STORED.name, "2"]
    wrapped, _, sealed = content.partition(b":")
    damaged = bytearray(base64.b64decode(sealed))
    damaged[-1] ^= 1
    server.stored[STORED.bucket, STORED.name, "2"] = (metadata, wrapped + b":" + base64.b64encode(damaged))
    found = await failing(server)
    assert str(found) == "Cloud Storage: the object cannot be decrypted: it is damaged"


@pytest.mark.parametrize(
    "answer", [b"hunter2", b"[]", json.dumps({"payload": {"data": "hunter2!"}}).encode()]
)
async def test_a_broken_answer(server: GoogleSecretsServer, answer: bytes) -> None:
    server.answer = lambda _: (200, answer)
    await failing(server, SecretVersion("proj", "db", "latest"))
    await failing(server)


@given(key=st.binary(max_size=40), sealed=st.binary(max_size=60))
def test_any_bytes_are_opened_or_refused(key: bytes, sealed: bytes) -> None:
    with pytest.raises(ConfigError):
        _opened(key, sealed)

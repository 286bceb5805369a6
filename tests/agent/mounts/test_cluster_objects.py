"""Secrets and ConfigMaps of an API server, which is the real one in `make test-kube`."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent.config.mount_settings import EnvFrom, ObjectName
from agent.mounts.cluster_objects import ClusterObjects
from agent.mounts.env_from import variables
from shared.errors import ConfigError, StatusError, UnavailableError
from tests.support.api_server import NAMESPACE, REAL, ApiServer, LocalApiServer, access, api_server

DB, APP = ObjectName("secret", "db-credentials"), ObjectName("configmap", "app-config")


def b64(value: bytes) -> str:
    return base64.b64encode(value).decode()


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as server:
        await server.put("secrets", DB.name, data={"user": b64(b"me"), "password": b64(b"\xff\x01hunter2")})
        await server.put(
            "configmaps",
            APP.name,
            data={"mode": "fäst", "empty": ""},
            binaryData={"logo.png": b64(b"\x89PNG\0")},
        )
        await server.delete("secrets", "absent")
        yield server


def objects(server: ApiServer, token: str | None = None, namespace: str = "") -> ClusterObjects:
    return ClusterObjects(access(server, token), namespace)


async def test_a_secret_s_values_are_bytes(server: ApiServer) -> None:
    found = await objects(server).need(DB)
    assert found.all == {"user": b"me", "password": b"\xff\x01hunter2"}
    assert "hunter2" not in repr(found)


async def test_a_config_map_has_texts_and_binaries(server: ApiServer) -> None:
    found = await objects(server).need(APP)
    assert found.texts == {"mode": "fäst".encode(), "empty": b""}
    assert found.binaries == {"logo.png": b"\x89PNG\0"}


async def test_each_change_has_another_digest(server: ApiServer) -> None:
    before = await objects(server).need(APP)
    await server.put("configmaps", APP.name, data={"mode": "slow"})
    after = await objects(server).need(APP)
    assert (await objects(server).need(APP)).digest == after.digest != before.digest


async def test_one_that_is_missing(server: ApiServer) -> None:
    absent = ObjectName("secret", "absent")
    assert await objects(server).read(absent) is None
    with pytest.raises(UnavailableError, match=r"^there is no secret/absent of namespace demo on https://"):
        await objects(server).need(absent)


@pytest.mark.parametrize("name", [ObjectName("secret", "others"), ObjectName("configmap", "others")])
async def test_one_that_we_may_not_read_names_the_rule_that_is_missing(
    server: ApiServer, name: ObjectName
) -> None:
    with pytest.raises(
        StatusError, match=f"has to allow us the verb get on {name.resource} in namespace demo"
    ) as it:
        await objects(server).read(name)
    assert it.value.exit_code == 77


async def test_a_large_one(server: ApiServer) -> None:
    large = os.urandom(1_000_000)
    await server.put("secrets", DB.name, data={"a": b64(large)})
    assert (await objects(server).need(DB)).all == {"a": large}


async def test_a_namespace_that_is_none() -> None:
    async with LocalApiServer() as server:
        with pytest.raises(UnavailableError, match=r"^namespace of https://.*: no name of a namespace"):
            objects(server, namespace="../kube-system")


# As variables.


async def test_later_ones_go_over_earlier_ones(server: ApiServer) -> None:
    await server.put("secrets", DB.name, data={"mode": b64(b"\xffmine"), "user.name": b64(b"me")})
    sources = [EnvFrom(APP, "", False), EnvFrom(DB, "", False), EnvFrom(APP, "APP_", False)]
    assert await variables(sources, objects(server)) == {
        "mode": "\udcffmine",
        "user.name": "me",
        "empty": "",
        "APP_mode": "fäst",
        "APP_empty": "",
    }


async def test_one_that_may_be_missing(server: ApiServer) -> None:
    absent = ObjectName("secret", "absent")
    assert await variables([EnvFrom(absent, "", True)], objects(server)) == {}
    with pytest.raises(UnavailableError, match="there is no secret/absent"):
        await variables([EnvFrom(absent, "", False)], objects(server))


async def test_what_no_variable_can_have(server: ApiServer) -> None:
    await server.put("secrets", DB.name, data={"key": b64(b"hunter\0two")})
    with pytest.raises(ConfigError, match=r"^secret/db-credentials of .* 'key': has a NUL byte") as it:
        await variables([EnvFrom(DB, "", False)], objects(server))
    assert it.value.exit_code == 78


# What a real one never answers.


@pytest.mark.skipif(REAL in os.environ, reason="about answers that a real one cannot be brought to")
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"data": {"../../etc/passwd": b64(b"x")}}, r"'../../etc/passwd': a key has letters"),
        ({"data": {"..data": b64(b"x")}}, r"'..data': a key has letters"),
        ({"data": {"a": "hunter2!"}}, "'a': is no base64"),
        ({"data": {"a": 1}}, "'a': is no text"),
        ({"data": ["a"]}, "data: is no mapping"),
    ],
)
async def test_what_is_malformed_is_refused(content: dict[str, Any], reason: str) -> None:
    async with LocalApiServer() as server:
        server.objects[NAMESPACE, "secrets", DB.name] = content
        with pytest.raises(ConfigError, match=f"^secret/db-credentials of namespace demo: {reason}") as it:
            await objects(server).read(DB)
    assert "hunter2" not in str(it.value)

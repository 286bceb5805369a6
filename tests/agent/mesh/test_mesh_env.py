"""mesh-env of an API server, which is the real one in `make test-kube`, and of files."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.config.layers import Layer, Layers
from agent.mesh import mesh_env
from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
from shared.errors import ConfigError, StatusError, UnavailableError, UsageError
from tests.support.api_server import MESH_ENV, NAMESPACE, REAL, ApiServer, LocalApiServer, access, api_server

OWN = {"TRUST_DOMAIN": "demo.example", "PORT_DB": "10.1.2.3:5432"}
MESH = {"TRUST_DOMAIN": "mesh.example", "HBONE_DRAIN_TIMEOUT": "3"}


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as server:
        yield server


async def test_the_namespace_s_goes_over_the_mesh_s(server: ApiServer) -> None:
    own, mesh = await mesh_env.read(KubernetesApi(access(server)), NAMESPACE)
    assert (own.name, own.values) == (f"mesh-env of {NAMESPACE}", OWN)
    assert (mesh.name, mesh.values) == ("mesh-env of istio-system", MESH), "without what krun does not know"
    assert Layers((own, mesh)).merged()["TRUST_DOMAIN"] == "demo.example"


async def test_who_may_not_read_it_is_told_which_role_is_missing(server: ApiServer) -> None:
    with pytest.raises(
        StatusError, match=r"403 Forbidden: .*; a Role has to allow us the verb get on configmaps"
    ):
        await mesh_env.read(KubernetesApi(access(server, server.forbidden)), NAMESPACE)


async def test_a_namespace_without_one_has_the_mesh_s(
    server: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    (mesh,) = await mesh_env.read(KubernetesApi(access(server)), "nobody")
    assert mesh.name == "mesh-env of istio-system"
    assert "in namespace nobody" in caplog.messages[0], "and it is told that we may not look there"


local = pytest.mark.skipif(REAL in os.environ, reason="about answers that a real one cannot be brought to")


@local
async def test_there_is_none() -> None:
    async with LocalApiServer(mesh_env={}) as server:
        with pytest.raises(
            UnavailableError, match="no ConfigMap mesh-env in demo or istio-system of https://"
        ):
            await mesh_env.read(KubernetesApi(access(server)), NAMESPACE)


@local
@pytest.mark.parametrize("data", [["TRUST_DOMAIN"], {"TRUST_DOMAIN": {"a": "b"}}, {"PORT_DB": True}])
async def test_one_that_is_malformed(data: object) -> None:
    async with LocalApiServer(mesh_env={**MESH_ENV, NAMESPACE: data}) as server:  # type: ignore[dict-item]
        with pytest.raises(ConfigError, match=f"^mesh-env of {NAMESPACE}: .*has to be a"):
            await mesh_env.read(KubernetesApi(access(server)), NAMESPACE)


# What may be in it.


def test_what_is_the_container_s_own_to_say_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hbone.mesh")
    told = {"ENVOY_BIN": "/tmp/evil", "KUBECONFIG": "/tmp/k", "MESH": "gke://", "HBONE_NEW": "1"}
    passed = {"CAROOT_ISTIOD": "pem", "ISTIO_META_MESH_ID": "b", "PORT_A": "b:1"}
    assert mesh_env.chosen({**told, **passed}, "it") == passed
    assert "it: not used: ENVOY_BIN, HBONE_NEW, KUBECONFIG, MESH" in caplog.text


def test_a_wrong_value_is_blamed_on_its_place() -> None:
    layers = Layers.of({"HBONE_APP": "x"}).over(Layer("mesh-env of demo", {"TRUST_DOMAIN": "_"}))
    error = UsageError("invalid TRUST_DOMAIN=_ (no name)")
    assert str(mesh_env.blamed(error, layers)) == "mesh-env of demo: invalid TRUST_DOMAIN=_ (no name)"
    own = UsageError("invalid HBONE_APP=x (no port)")
    assert mesh_env.blamed(own, layers) is own


# Files.


@pytest.mark.parametrize(
    "text",
    [
        "# of the mesh\nTRUST_DOMAIN=mesh.example\n\nHBONE_DRAIN_TIMEOUT = 3\nOTHERS=1\n",
        "TRUST_DOMAIN: mesh.example\nHBONE_DRAIN_TIMEOUT: 3\n",
        '{"kind": "ConfigMap", "data": {"TRUST_DOMAIN": "mesh.example", "HBONE_DRAIN_TIMEOUT": "3"}}',
    ],
    ids=["lines", "yaml", "manifest"],
)
def test_a_file_has_one_of_three_forms(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mesh-env"
    file.write_text(text)
    assert mesh_env.read_file(file) == Layer(str(file), MESH)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("a: [", "no valid YAML"), ("- a", "has to be a mapping"), ("A=1\nnothing", ":2: has to be NAME=VALUE")],
)
def test_a_file_that_has_none(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "mesh-env"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        mesh_env.read_file(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"MESH=file:///.*: No such file"):
        mesh_env.read_file(tmp_path / "nothing")

"""Which variables the app gets: the rule, and a real krun that keeps to it."""

from __future__ import annotations

import re

import pytest

from agent.config.settings import ENVIRONMENT, from_env
from agent.launch.app_environment import app_environment, with_proxy
from shared.address import Address
from tests.agent.test_app import krun

KUBERNETES = {"HBONE_K8S_TOKENS": "pod", "KUBECONFIG": "/etc/krun/kubeconfig"}


def app_gets(**variables: str) -> set[str]:
    return set(app_environment(variables, from_env(variables)))


def test_what_is_krun_s_own_stays_with_krun() -> None:
    settings = {name: "x" for name in ENVIRONMENT if name.startswith("HBONE_")}
    got = app_environment({**settings, "HBONE_NOT_KNOWN": "x"}, from_env({}))
    assert set(got) == {"HBONE_CERTS", "HBONE_STS_LISTEN"}


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "HOME",
        "PROJECT_ID",
        "K_SERVICE",
        "KUBERNETES_SERVICE_HOST",
        "XDS_ADDR",
        "DB_PASSWORD",
        "PORT_DB",
    ],
)
def test_what_is_not_krun_s_own_is_the_app_s(name: str) -> None:
    value = "127.0.0.1:5432" if name in ("PORT_DB", "XDS_ADDR") else "x"
    assert app_gets(**{name: value}) == {name}


def test_the_kubeconfig_stays_with_krun_where_krun_uses_it() -> None:
    assert app_gets(**KUBERNETES) == set()
    assert app_gets(**KUBERNETES, HBONE_PASS_TO_APP="KUBECONFIG") == {"KUBECONFIG"}
    assert app_gets(KUBECONFIG="/home/me/.kube/config") == {"KUBECONFIG"}
    assert app_gets(KUBECONFIG="/etc/krun/kubeconfig", MESH="kubernetes") == {"MESH"}


def test_more_can_be_hidden() -> None:
    environ = {"DB_PASSWORD": "x", "API_KEY": "x", "api_key": "x", "DB_HOST": "x"}
    assert app_gets(**environ, HBONE_HIDE_FROM_APP="*_PASSWORD, API_KEY") == {"api_key", "DB_HOST"}


def test_who_names_what_the_app_gets_decides() -> None:
    environ = {"PATH": "x", "LANG": "x", "HBONE_TOKENS": "gke", "DB_PASSWORD": "x"}
    told = {"HBONE_HIDE_FROM_APP": "*", "HBONE_PASS_TO_APP": "PATH,HBONE_TOKENS"}
    assert app_gets(**environ, **told) == {"PATH", "HBONE_TOKENS"}


async def test_a_real_krun_keeps_its_own() -> None:
    told = {
        "HBONE_HIDE_FROM_APP": "*_PASSWORD",
        "DB_PASSWORD": "hidden",
        "K_SERVICE": "hello",
        "HBONE_CERTS": "/certs",
    }
    async with krun("env", environ=told) as it:
        code, out, _ = await it.process.ended()
    got = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    assert code == 0
    assert re.fullmatch(r"\d+", got["PORT"])
    assert got["K_SERVICE"] == "hello"
    assert [name for name in got if name.startswith("HBONE_")] == ["HBONE_CERTS"]
    assert "hidden" not in out


# A proxy into the mesh.

PROXY = Address("127.0.0.1", 15007)


def by_proxy(**variables: str) -> dict[str, str]:
    return with_proxy(app_environment(variables, from_env(variables)), PROXY)


def test_a_proxy_into_the_mesh() -> None:
    got = by_proxy(PATH="/bin")
    assert got["HTTP_PROXY"] == got["http_proxy"] == "http://127.0.0.1:15007"
    assert got["NO_PROXY"] == got["no_proxy"]
    assert "HTTPS_PROXY" not in got
    assert {"localhost", "127.0.0.1", "::1", "metadata.google.internal", "169.254.169.254"} < set(
        got["NO_PROXY"].split(",")
    )


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy"])
def test_a_proxy_of_the_app_s_own_stays(name: str) -> None:
    assert by_proxy(**{name: "http://elsewhere:3128"}) == {name: "http://elsewhere:3128"}
    assert "HTTP_PROXY" in by_proxy(HTTP_PROXY="http://a:1", HBONE_HIDE_FROM_APP="HTTP_PROXY")


def test_what_the_app_keeps_from_proxies_is_kept_from_this_one() -> None:
    got = by_proxy(no_proxy="db, cache", GCE_METADATA_HOST="10.0.0.9:8080")
    assert got["NO_PROXY"].startswith("db,cache,localhost,")
    assert got["no_proxy"].endswith(",10.0.0.9")


def test_grpc_without_a_proxy_is_left_without_one() -> None:
    got = by_proxy(GRPC_XDS_BOOTSTRAP="/etc/grpc.json")
    assert ("HTTP_PROXY" in got, "http_proxy" in got) == (True, False)

"""Services by their names: what the cluster and Cloud Run's API say, who is told which credentials, and what
is kept."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hbone.services.found_service import FoundService
from hbone.services.lookup import Lookup
from hbone.services.named_service import ServiceName
from shared.cluster.service_annotations import AUDIENCE, ORIGINAL_LABEL, URL
from shared.errors import UnavailableError, UsageError
from tests.support.api_server import LocalApiServer, kubeconfig
from tests.support.gcloud_command import GcloudCommand
from tests.support.metadata_server import closed_port
from tests.support.run_api import TOKEN, RunApi
from tests.support.wall_clock import Clock

HELLO = "https://hello-abcdefghij-uc.a.run.app"
NAMED = ServiceName("hello", "demo")

pytestmark = pytest.mark.shows_secret  # gcloud is asked for one


class World:
    """A cluster, a project and a home."""

    def __init__(self, cluster: LocalApiServer, run: RunApi, folder: Path, clock: Clock) -> None:
        self.cluster, self.run, self.clock = cluster, run, clock
        self.gcloud = GcloudCommand(folder)
        self.gcloud.prints(access=TOKEN)
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(kubeconfig(cluster))
        self.home = folder / "home"
        self.home.mkdir()
        self.objects: dict[str, Any] = {}
        cluster.answer = lambda asked: self._answer(asked.path)

    def has(self, path: str, about: dict[str, Any]) -> None:
        """An object of the cluster."""
        self.objects[path] = {"metadata": about}

    def _answer(self, path: str) -> tuple[int, bytes] | None:
        found = self.objects.get(path)
        if found is None and "?" not in path:
            return None
        return 200, json.dumps(found or {"items": []}).encode()

    def lookup(self, **told: str) -> Lookup:
        environ = {
            **self.gcloud.environ,
            "HOME": str(self.home),
            "KUBECONFIG": str(self.kubeconfig),
            "HBONE_RUN_URL": self.run.url,
        }
        flags = {name: told.pop(name) for name in ("project", "region") if name in told}
        return Lookup(environ | told, **flags, now=self.clock)

    async def refusal(self, name: ServiceName, **told: str) -> str:
        with pytest.raises(UnavailableError) as caught:
            await self.lookup(**told).find(name)
        assert str(caught.value).isprintable()
        return str(caught.value)


@pytest.fixture
async def world(tmp_path: Path, clock: Clock) -> AsyncIterator[World]:
    async with LocalApiServer() as cluster, RunApi() as run:
        yield World(cluster, run, tmp_path, clock)


def service(name: str, namespace: str = "demo") -> str:
    return f"/api/v1/namespaces/{namespace}/services/{name}"


def entry(name: str, namespace: str = "demo") -> str:
    return f"/apis/networking.istio.io/v1/namespaces/{namespace}/serviceentries/{name}"


# The cluster.


async def test_an_annotated_service(world: World) -> None:
    world.has(service("hello"), {"name": "hello", "annotations": {URL: HELLO, AUDIENCE: "api"}})
    found = await world.lookup().find(NAMED)
    assert found == FoundService(HELLO, "Service demo/hello of context test", "api")
    (asked,) = world.cluster.asked
    assert asked.headers["authorization"] == f"Bearer {world.cluster.allowed}"
    assert (world.run.requests, world.gcloud.asked) == ([], []), "nobody else was asked"


async def test_a_namespace_that_is_the_context_s(world: World) -> None:
    world.has(service("hello"), {"name": "hello", "annotations": {URL: HELLO}})
    assert (await world.lookup().find(ServiceName("hello"))).url == HELLO


async def test_an_annotated_service_entry(world: World) -> None:
    world.has(service("hello"), {"name": "hello"})
    world.has(entry("hello"), {"name": "hello", "annotations": {URL: HELLO}})
    found = await world.lookup().find(NAMED)
    assert found == FoundService(HELLO, "ServiceEntry demo/hello of context test")


async def test_the_original_s_label(world: World) -> None:
    about = {"name": "hello-abcdefghij-uc", "labels": {ORIGINAL_LABEL: "hello"}}
    world.objects["/api/v1/namespaces/demo/services?labelSelector=mesh-cloudrun%3Dhello&limit=2"] = {
        "items": [{"metadata": about}]
    }
    assert (await world.lookup().find(ServiceName("hello"))).url == HELLO
    world.has(service("hello-abcdefghij-uc"), about)
    assert (await world.lookup().find(ServiceName("hello-abcdefghij-uc", "demo"))).url == HELLO


async def test_a_service_that_leads_nowhere(world: World) -> None:
    world.has(service("hello"), {"name": "hello", "annotations": {URL: "http://hello"}})
    assert f"{URL} http://hello has to be https://HOST" in await world.refusal(NAMED)
    world.has(service("hello"), {"name": "hello"})
    assert f"Service demo/hello of context test has no annotation {URL}" in await world.refusal(NAMED)
    refused = await world.refusal(ServiceName("none", "demo"))
    assert refused.startswith("no service none.demo: context test has no Service demo/none; Cloud Run in ")
    assert refused.endswith("; a host of this name is written as https://none.demo")


# Cloud Run's API.


async def test_a_service_of_the_project(world: World) -> None:
    world.run.services = [
        {"name": "other", "region": "r1", "url": "https://other"},
        {"name": "hello", "region": "r1", "url": HELLO, "namespace": "demo"},
    ]
    found = await world.lookup().find(NAMED)
    assert found == FoundService(HELLO, "Cloud Run in project proj, r1")
    assert {one.headers["authorization"] for one in world.run.requests} == {f"Bearer {TOKEN}"}
    assert len(world.run.requests) == 2, "page by page"
    assert TOKEN not in str([one.headers for one in world.cluster.asked])
    found = await world.lookup(region="r1").find(NAMED)
    assert found == FoundService(HELLO, "Cloud Run in project proj, r1")
    assert world.run.requests[-1].path == "/v2/projects/proj/locations/r1/services/hello"


async def test_a_flag_keeps_the_cluster_out(world: World) -> None:
    world.has(service("hello"), {"name": "hello", "annotations": {URL: "https://of.cluster.example"}})
    world.run.services = [{"name": "hello", "region": "r1", "url": HELLO}]
    assert (await world.lookup(project="proj").find(ServiceName("hello"))).url == HELLO
    assert world.cluster.asked == []


async def test_a_service_of_another_namespace_is_not_it(world: World) -> None:
    world.run.services = [{"name": "hello", "region": "r1", "url": HELLO, "namespace": "\x1b[2J$(id)"}]
    assert "is of no namespace that its WORKLOAD_NAMESPACE would name" in await world.refusal(NAMED)
    world.run.services = [{"name": "hello", "region": "r1", "url": HELLO, "namespace": "prod"}]
    text = "hello of Cloud Run in project proj is of prod; if it is meant, write hello alone"
    assert text in await world.refusal(NAMED)
    world.run.services = [{"name": "hello", "region": "r1", "url": HELLO}]
    assert "is of no namespace that its WORKLOAD_NAMESPACE would name" in await world.refusal(NAMED)


async def test_several_regions(world: World) -> None:
    world.run.services = [{"name": "hello", "region": f"r{n}", "url": f"{HELLO}{n}"} for n in (1, 2)]
    text = "has hello in several regions, r1, r2: name one with --region"
    assert text in await world.refusal(ServiceName("hello"))
    assert (await world.lookup(region="r2").find(ServiceName("hello"))).url == f"{HELLO}2"


async def test_what_the_api_refuses(world: World) -> None:
    world.run.answer = 403, b'{"error": {"status": "PERMISSION_DENIED", "message": "x"}}'
    text = "answered 403 (PERMISSION_DENIED); gcloud's me@example.com needs roles/run.viewer"
    assert text in await world.refusal(NAMED)
    world.run.answer = 200, b"[]"
    assert "no JSON object" in await world.refusal(NAMED)
    world.run.answer, world.run.tokens = None, set()
    assert "answered 401 (UNAUTHENTICATED)" in await world.refusal(NAMED)
    assert "'p/../q' is no name of a Google project" in await world.refusal(NAMED, project="p/../q")
    world.gcloud.does("fail")
    assert "gcloud auth print-access-token ended with exit code 1" in await world.refusal(NAMED)


async def test_nobody_to_ask(world: World) -> None:
    nothing = {"KUBECONFIG": "/nonexistent/k", "PATH": "/nonexistent"}
    refused = await world.refusal(NAMED, **nothing)
    assert "no kubeconfig: /nonexistent/k: no such file; no login for Cloud Run's API" in refused
    world.gcloud.configure(account="me@example.com")
    refused = await world.refusal(NAMED, **nothing)
    assert "no Google project to look in: --project, or gcloud config set project PROJECT" in refused


async def test_a_cluster_that_is_gone(world: World) -> None:
    world.run.services = [{"name": "hello", "region": "r1", "url": HELLO, "namespace": "demo"}]
    world.cluster.url = f"https://127.0.0.1:{closed_port()}"
    world.kubeconfig.write_text(kubeconfig(world.cluster))
    assert (await world.lookup().find(NAMED)).url == HELLO
    refused = await world.refusal(ServiceName("hello"))
    assert "Connection refused" in refused or "connection refused" in refused, "it might be another's hello"
    assert refused.endswith("; --project PROJECT asks Cloud Run only")
    assert (await world.lookup(project="proj").find(ServiceName("hello"))).url == HELLO


async def test_a_wrong_proxy_is_said_at_once(world: World) -> None:
    world.cluster.url = "https://kubernetes.example"  # this machine is reached without
    world.kubeconfig.write_text(kubeconfig(world.cluster))
    with pytest.raises(UsageError, match=r"^invalid HTTPS_PROXY"):
        await world.lookup(HTTPS_PROXY="socks5://p:1").find(NAMED)


# What is kept.


async def test_an_answer_is_kept_for_minutes(world: World) -> None:
    world.has(service("hello"), {"name": "hello", "annotations": {URL: HELLO}})
    await world.lookup().find(NAMED)
    await world.lookup().find(NAMED)
    assert len(world.cluster.asked) == 1
    world.clock.turn(599)
    await world.lookup().find(NAMED)
    assert len(world.cluster.asked) == 1
    world.clock.turn(2)
    await world.lookup().find(NAMED)
    assert len(world.cluster.asked) == 2


async def test_another_context_is_another_question(world: World) -> None:
    world.has(service("hello"), {"name": "hello", "annotations": {URL: HELLO}})
    await world.lookup().find(NAMED)
    world.kubeconfig.write_text(kubeconfig(world.cluster) + "\n")
    await world.lookup().find(NAMED)
    world.gcloud.configure(account="other@example.com", project="proj")
    await world.lookup().find(NAMED)
    assert len(world.cluster.asked) == 3


async def test_nothing_is_kept_if_told_so(world: World) -> None:
    world.has(service("hello"), {"name": "hello", "annotations": {URL: HELLO}})
    for _ in range(2):
        await world.lookup(HBONE_CACHE="none").find(NAMED)
    assert len(world.cluster.asked) == 2
    assert list(world.home.iterdir()) == []


async def test_a_kept_answer_that_is_none(world: World) -> None:
    world.has(service("hello"), {"name": "hello", "annotations": {URL: HELLO}})
    lookup = world.lookup()
    question = lookup._question("service", "hello", "demo")
    for wrong in ("x", {"url": "ftp://x", "place": ""}, {"url": HELLO}, {"url": HELLO, "place": 1}, None):
        lookup._kept.put(question, wrong, world.clock() + 10)
        assert (await world.lookup().find(NAMED)).url == HELLO
    assert len(world.cluster.asked) == 5


# Names, for completions.


async def test_the_names_of_a_cluster(world: World) -> None:
    about = {"name": "hello", "namespace": "demo", "annotations": {URL: HELLO}}
    plain = {"name": "plain", "namespace": "demo"}
    world.objects["/api/v1/services?limit=500"] = {
        "items": [{"metadata": about}, {"metadata": plain}],
        "metadata": {"continue": "next"},
    }
    world.objects["/api/v1/services?limit=500&continue=next"] = {
        "items": [{"metadata": {**about, "name": "more"}}]
    }
    assert await world.lookup().names() == ["hello.demo", "more.demo"]
    count = len(world.cluster.asked)
    assert await world.lookup().names() == ["hello.demo", "more.demo"]
    assert len(world.cluster.asked) == count


async def test_the_names_of_a_project(world: World) -> None:
    world.run.services = [
        {"name": "b", "region": "r1", "url": HELLO, "namespace": "demo"},
        {"name": "a", "region": "r1", "url": HELLO},
    ]
    assert await world.lookup(project="proj").names() == ["a", "b.demo"]
    world.run.answer = 500, b""
    assert await world.lookup(region="r9").names() == []

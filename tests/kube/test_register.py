"""`hbone register` and a real API server: who owns what of the Service, and what the command says of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.cluster.service_annotations import HGATE, REFUSED, REGISTER, STATUS, URL
from shared.credentials.kubernetes.kubernetes_api import KubernetesApi
from shared.errors import (
    EXIT_CONFIG,
    EXIT_DENIED,
    EXIT_OK,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    ConflictError,
    StatusError,
)
from tests.hbone.commands import Ended, output_of, running
from tests.support.api_server import NAMESPACE, RealApiServer, access, kubeconfig

HELLO = "https://hello-123456789012.us-central1.run.app"
PATH = f"/api/v1/namespaces/{NAMESPACE}/services"


class Cluster:
    """The server as an administrator has it, and a kubeconfig for the command."""

    def __init__(self, server: RealApiServer, folder: Path) -> None:
        self.api = KubernetesApi(access(server, server.admin))
        self.file = folder / "kubeconfig"
        self.file.write_text(kubeconfig(server, server.admin))

    async def register(self, *arguments: str) -> Ended:
        return await output_of("register", *arguments, environ={"KUBECONFIG": str(self.file)})

    async def written(self, name: str = "hello") -> dict[str, Any]:
        return await self.api.ask("GET", f"{PATH}/{name}")

    async def apply(self, manager: str, name: str = "hello", **content: Any) -> None:
        """As somebody else."""
        about = {"name": name, "namespace": NAMESPACE, **content.pop("metadata", {})}
        manifest = {"apiVersion": "v1", "kind": "Service", "metadata": about, **content}
        await self.api.apply(f"{PATH}/{name}", manifest, manager)

    async def say(self, status: str) -> None:
        """As hgate."""
        await self.apply(f"{HGATE}-status", metadata={"annotations": {STATUS: status}})


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(RealApiServer.running(), tmp_path)
    yield cluster
    asyncio.run(cluster.api.ask("DELETE", PATH))


async def test_the_service_is_written_and_what_hgate_says_is_printed(cluster: Cluster) -> None:
    environ = {"KUBECONFIG": str(cluster.file)}
    async with running("register", HELLO, "--audience", "https://hello.example", environ=environ) as command:
        server = cluster.api.server
        assert await command.line() == f"service    {NAMESPACE}/hello http:80: written, at {server}"
        assert await command.line() == f"leads to   {HELLO}/_hbone/15003"
        await cluster.say("routed")
        assert await command.line() == "status     routed"
        assert (await command.ended()).code == EXIT_OK
    written = await cluster.written()
    told = {URL: HELLO, "hbone.dev/audience": "https://hello.example", STATUS: "routed"}
    assert written["metadata"]["annotations"] == told
    assert "selector" not in written["spec"]
    (port,) = written["spec"]["ports"]
    assert (port["name"], port["port"], port["protocol"]) == ("http", 80, "TCP")


async def test_a_second_time_nothing_is_written(cluster: Cluster) -> None:
    assert (await cluster.register(HELLO, "--no-wait")).code == EXIT_OK
    await cluster.say(f"{REFUSED}cluster.allow says nothing of namespace {NAMESPACE}")
    before = await cluster.written()
    ended = await cluster.register(HELLO)
    assert ended.code == EXIT_DENIED
    assert b"http:80: as it was, at" in ended.stdout
    assert b"status     refused: cluster.allow says nothing" in ended.stdout
    assert await cluster.written() == before


async def test_an_old_status_is_not_taken_for_the_answer_to_a_change(cluster: Cluster) -> None:
    assert (await cluster.register(HELLO, "--no-wait")).code == EXIT_OK
    await cluster.say("routed to the old one")
    environ = {"KUBECONFIG": str(cluster.file)}
    async with running("register", HELLO, "--target-port", "db", environ=environ) as command:
        assert (await command.line()).endswith(f"written, at {cluster.api.server}")
        assert await command.line() == f"leads to   {HELLO}/_hbone/db"
        await cluster.say("routed to the new one")
        assert await command.line() == "status     routed to the new one"


async def test_no_hgate(cluster: Cluster) -> None:
    ended = await cluster.register(HELLO, "--timeout", "0.1")
    assert ended.code == EXIT_UNAVAILABLE
    assert f"hbone: no hgate has said anything about Service {NAMESPACE}/hello within 0.1 s" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert (await cluster.written())["metadata"]["annotations"] == {URL: HELLO}


async def test_a_field_of_somebody_else_s_stays(cluster: Cluster) -> None:
    """One line says who owns what."""
    theirs = {"annotations": {URL: "https://other.a.run.app"}}
    await cluster.apply("argocd", metadata=theirs, spec={"ports": [{"name": "web", "port": 80}]})
    before = await cluster.written()
    ended = await cluster.register(HELLO)
    assert (ended.code, ended.stdout) == (EXIT_DENIED, b"")
    assert ended.stderr == (
        f"hbone: Service {NAMESPACE}/hello is not written, for others own fields of it: "
        f".metadata.annotations.{URL} is argocd's, "
        '.spec.ports[port=80,protocol="TCP"].name is argocd\'s\n'
    )
    assert await cluster.written() == before


async def test_a_service_with_pods_is_left_alone(cluster: Cluster) -> None:
    spec = {"selector": {"app": "hello"}, "ports": [{"name": "http", "port": 80}]}
    await cluster.apply("kubectl", spec=spec)
    ended = await cluster.register(HELLO)
    assert ended.code == EXIT_DENIED
    assert (
        f"Service {NAMESPACE}/hello is there, for the pods app=hello: choose another --name" in ended.stderr
    )
    ended = await cluster.register(HELLO, "--name", "outside", "--no-wait")
    assert ended.code == EXIT_OK, ended.stderr
    assert (await cluster.written("outside"))["metadata"]["annotations"] == {URL: HELLO}


async def test_removal(cluster: Cluster) -> None:
    assert (await cluster.register(HELLO, "--no-wait")).code == EXIT_OK
    await cluster.say("routed")
    ended = await cluster.register(HELLO, "--remove")
    assert (ended.code, ended.stderr) == (EXIT_OK, "")
    assert f"{NAMESPACE}/hello: removed".encode() in ended.stdout
    with pytest.raises(StatusError, match="404"):
        await cluster.written()
    ended = await cluster.register("--remove", "--name", "hello")
    assert (ended.code, ended.stderr) == (EXIT_UNAVAILABLE, f"hbone: there is no Service {NAMESPACE}/hello\n")


async def test_of_a_service_with_two_owners_only_the_annotations_are_removed(cluster: Cluster) -> None:
    ports = [{"name": "http", "port": 80, "protocol": "TCP"}]
    await cluster.apply("argocd", metadata={"labels": {"team": "a"}}, spec={"ports": ports})
    assert (await cluster.register(HELLO, "--no-wait")).code == EXIT_OK
    ended = await cluster.register(HELLO, "--remove")
    assert ended.code == EXIT_OK, ended.stderr
    assert b"it stays, for it is argocd's too" in ended.stdout
    left = await cluster.written()
    assert left["metadata"].get("annotations", {}) == {}
    assert (left["metadata"]["labels"], left["spec"]["ports"][0]["name"]) == ({"team": "a"}, "http")


async def test_a_service_of_somebody_else_s_is_not_removed(cluster: Cluster) -> None:
    await cluster.apply("argocd", spec={"ports": [{"name": "http", "port": 80}]})
    ended = await cluster.register(HELLO, "--remove")
    assert ended.code == EXIT_DENIED
    assert f"Service {NAMESPACE}/hello is not hbone register's: argocd wrote it" in ended.stderr
    await cluster.written()


async def test_rbac(cluster: Cluster, tmp_path: Path) -> None:
    server = RealApiServer.running()
    cluster.file.write_text(kubeconfig(server, server.forbidden))
    ended = await cluster.register(HELLO)
    assert ended.code == EXIT_DENIED
    assert f"a Role has to allow us the verb get on services in namespace {NAMESPACE}" in ended.stderr


async def test_a_namespace_that_is_not_there(cluster: Cluster) -> None:
    ended = await cluster.register(HELLO, "-n", "nowhere")
    assert (ended.code, ended.stdout) == (EXIT_UNAVAILABLE, b"")
    assert 'namespaces "nowhere" not found' in ended.stderr


async def test_what_is_wrong_is_said_before_the_cluster_is_asked(cluster: Cluster) -> None:
    cluster.file.write_text("no: kubeconfig")
    for arguments, reason in (
        (("http://h.example",), "has to be https://HOST"),
        ((HELLO, "--port", "grpc:0"), "a port is 1 to 65535"),
        ((HELLO, "--gateway", "10.0.0.1"), "--gateway has a meaning with --print only"),
    ):
        ended = await cluster.register(*arguments)
        assert ended.code == EXIT_USAGE and reason in ended.stderr
    assert (await cluster.register(HELLO)).code == EXIT_CONFIG


async def test_a_dry_run_writes_nothing_and_conflicts_have_a_class(cluster: Cluster) -> None:
    manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "hello", "namespace": NAMESPACE, "labels": {"a": "1"}},
        "spec": {"ports": [{"name": "http", "port": 80, "protocol": "TCP"}]},
    }
    there = await cluster.api.apply(f"{PATH}/hello", manifest, REGISTER, dry_run=True)
    assert there["metadata"]["labels"] == {"a": "1"}
    with pytest.raises(StatusError, match="404"):
        await cluster.written()
    await cluster.api.apply(f"{PATH}/hello", manifest, REGISTER)
    with pytest.raises(ConflictError, match=rf"\.metadata\.labels\.a is {REGISTER}'s$"):
        await cluster.apply("other", metadata={"labels": {"a": "2"}})

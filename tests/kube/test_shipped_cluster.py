"""`hgate cluster` with the account, the Roles and the guard of deploy/k8s: all that it does is allowed, and
where nobody has bound it, it says so and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kube.objects import Cluster, of_kind, rendered
from tests.support.api_server import RealApiServer
from tests.support.cluster_process import hgate_cluster
from tests.support.tcp_peer import PATIENCE_S

URL = "https://hello-123456789012.europe-west1.run.app"
ALLOW = '[{namespace: "shipped-*", projects: ["123456789012"]}]'

BOUND, UNBOUND = "shipped-bound", "shipped-unbound"

RIGHTS = (
    *("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "Lease", "Service"),
    *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
)


@pytest.fixture
def deployed(cluster: Cluster) -> Iterator[Cluster]:
    """As shipped, with two namespaces of which one is bound, each with a Service that asks for a route."""
    (binding,) = rendered("namespace")
    about = {**binding["metadata"], "namespace": BOUND}
    made: list[dict[str, Any]] = [
        *({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in (BOUND, UNBOUND)),
        *of_kind(rendered("overlays/gke", with_options=True), *RIGHTS),
        {**binding, "metadata": about},
    ]
    for namespace in (BOUND, UNBOUND):
        asks = {"name": "hello", "namespace": namespace, "annotations": {"hbone.dev/cloudrun-url": URL}}
        spec = {"ports": [{"name": "http", "port": 8080}]}
        made.append({"apiVersion": "v1", "kind": "Service", "metadata": asks, "spec": spec})
    for each in made:
        cluster.apply(each)
    yield cluster
    for namespace in (BOUND, UNBOUND):
        cluster.admin.ask("DELETE", f"/api/v1/namespaces/{namespace}/services/hello")


async def test_it_may_do_what_it_does(deployed: Cluster, tmp_path: Path) -> None:
    client = deployed.client("hbone-system", "hgate")
    environ = {"POD_NAMESPACE": "hbone-system"}
    async with hgate_cluster(
        RealApiServer.running(), tmp_path, ALLOW, token=client.token, environ=environ, register="true"
    ) as process:
        hosts = {f"hello.{namespace}.svc.cluster.local" for namespace in (BOUND, UNBOUND)}
        await _until(lambda: process.routes().keys() >= hosts)
        await _until(lambda: status(deployed, BOUND).startswith("routed"))
        of_istio = f"/apis/networking.istio.io/v1/namespaces/{BOUND}"
        await _until(lambda: made(deployed, f"{of_istio}/workloadentries"))
        await _until(lambda: made(deployed, f"{of_istio}/destinationrules"))
        # What it has made is its to remove: the Service asks for nothing any more.
        plain = {"metadata": {"annotations": {"hbone.dev/cloudrun-url": None}}}
        path = f"/api/v1/namespaces/{BOUND}/services/hello"
        assert deployed.admin.ask("PATCH", path, plain, "application/merge-patch+json").status == 200
        await _until(lambda: not made(deployed, f"{of_istio}/workloadentries"))
        # The other one is routed, as cluster.allow has it, and untouched.
        await process.process.said("services in namespace shipped-unbound|is forbidden")
        assert status(deployed, UNBOUND) == ""
        assert not made(deployed, of_istio.replace(BOUND, UNBOUND) + "/workloadentries")


def status(cluster: Cluster, namespace: str) -> str:
    found = cluster.admin.ask("GET", f"/api/v1/namespaces/{namespace}/services/hello").body
    return str(found["metadata"]["annotations"].get("hbone.dev/status", ""))


def made(cluster: Cluster, path: str) -> list[str]:
    """The names of the objects there."""
    return [one["metadata"]["name"] for one in cluster.admin.ask("GET", path).body["items"]]


async def _until(happens: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(happens):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

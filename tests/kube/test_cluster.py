"""`hgate cluster` at a real API server: what objects become, who may read, who writes."""

from __future__ import annotations

import asyncio
import re
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shared.address import Address
from tests.kube.conftest import Hands
from tests.support.api_server import RealApiServer
from tests.support.cluster_process import gateway_file, hgate_cluster, until
from tests.support.hellos import hello
from tests.support.hgate_process import hgate
from tests.support.metadata_server import Answer, MetadataServer
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer

URL = "https://hello-abcdefghij-uc.a.run.app"


@pytest.fixture
async def namespace(hands: Hands) -> str:
    """A namespace of the test's own."""
    name = f"team-{uuid.uuid4().hex[:8]}"
    await hands.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """What both processes share."""
    (tmp_path / "run").mkdir()
    yield tmp_path / "run"


def service(namespace: str, name: str = "hello", **annotations: str) -> dict[str, Any]:
    told = {f"hbone.dev/{key.replace('_', '-')}": value for key, value in annotations.items()}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "annotations": told},
        "spec": {"ports": [{"name": "http", "port": 80, "targetPort": 8080}]},
    }


def allowing(namespace: str, **more: str) -> str:
    fields = {"namespace": namespace, "hosts": '["**.run.app"]', **more}
    return "[{" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "}]"


async def status_of(hands: Hands, namespace: str, name: str = "hello") -> str | None:
    found = await hands.get(f"/api/v1/namespaces/{namespace}/services/{name}")
    assert found is not None
    told: dict[str, str] = found["metadata"].get("annotations") or {}
    return told.get("hbone.dev/status")


async def until_status(hands: Hands, namespace: str, pattern: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not re.search(pattern, await status_of(hands, namespace) or ""):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def events_of(hands: Hands, namespace: str) -> list[tuple[str, str, str]]:
    found = await hands.get(f"/api/v1/namespaces/{namespace}/events")
    assert found is not None
    return [(one["type"], one["reason"], one["involvedObject"]["name"]) for one in found["items"]]


async def test_an_annotated_service_is_a_route_within_two_seconds(
    server: RealApiServer, hands: Hands, namespace: str, folder: Path
) -> None:
    host = f"hello.{namespace}.svc.cluster.local"
    async with hgate_cluster(server, folder, allowing(namespace)) as cluster:
        await until(lambda: (folder / "routes.json").exists())
        async with hgate(folder / "hgate-0.yaml") as gateway:
            assert host not in cluster.routes()
            await hands.apply(service(namespace, cloudrun_url=URL))
            started = time.monotonic()
            await gateway.said("^reload: 1 routes")
            assert time.monotonic() - started < 2
            assert cluster.routes() == {host: f"{URL}/_hbone/15003"}
            (route,) = (await gateway.dump("/config"))["routes"]
            assert (route["host"], route["source"]) == (host, f"Service {namespace}/hello")

            await hands.delete(service(namespace))
            started = time.monotonic()
            await gateway.said("^reload: 0 routes")
            assert time.monotonic() - started < 2


async def test_what_is_not_allowed_is_told_to_the_object(
    server: RealApiServer, hands: Hands, namespace: str, folder: Path
) -> None:
    await hands.apply(service(namespace, cloudrun_url="https://somebody-elses.example.com"))
    async with hgate_cluster(server, folder, allowing(namespace)) as cluster:
        await until_status(hands, namespace, "^refused")
        told = f"refused: cluster.allow in hgate's file does not let namespace {namespace} lead to"
        assert await status_of(hands, namespace) == f"{told} somebody-elses.example.com"
        assert cluster.routes() == {}
        async with asyncio.timeout(PATIENCE_S):
            while await events_of(hands, namespace) != [("Warning", "NotRouted", "hello")]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await cluster.metric("hbone_cluster_refused") == 1

        hosts = '["somebody-elses.example.com"]'
        (folder / "hgate-0.yaml").write_text(gateway_file(folder, allowing(namespace, hosts=hosts)))
        await until_status(hands, namespace, "^routed to")
        assert list(cluster.routes()) == [f"hello.{namespace}.svc.cluster.local"]

        await hands.apply(service(namespace))  # without the annotation, and without the status: it was theirs
        await until(lambda: not cluster.routes())


async def test_the_addresses_of_services_that_a_route_takes_connects_for(
    server: RealApiServer, hands: Hands, namespace: str, folder: Path
) -> None:
    for name in ("hello", "other"):
        await hands.apply(service(namespace, name))
    found = await hands.get(f"/api/v1/namespaces/{namespace}/services/hello")
    assert found is not None
    host = f"hello.{namespace}.svc.cluster.local"
    async with hgate_cluster(server, folder, "[]") as cluster:
        await until(lambda: (folder / "routes.json").exists())
        assert cluster.addresses() == {}
        route = f'{{host: {host}, tunnel: "{URL}/_hbone/15008", inner: hbone}}'
        file = gateway_file(folder, "[]").replace("routes: []", f"routes: [{route}]")
        (folder / "hgate-0.yaml").write_text(f"{file}hbone: {{certificates: certs, rules: []}}\n")
        await until(lambda: cluster.addresses() == {found["spec"]["clusterIP"]: host})
        await hands.delete(service(namespace))
        await until(lambda: cluster.addresses() == {})


async def test_the_endpoints_of_services_that_may_be_reached(
    server: RealApiServer, hands: Hands, namespace: str, folder: Path
) -> None:
    ends = [{"addresses": ["10.1.0.1"]}, {"addresses": ["10.1.0.2"], "conditions": {"ready": False}}]
    ends += [{"addresses": ["10.1.0.3"], "conditions": {"ready": True}}]
    slice_ = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "hello-1",
            "namespace": namespace,
            "labels": {"kubernetes.io/service-name": "hello"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080}, {"name": "other", "port": 9090}],
        "endpoints": ends,
    }
    await hands.apply(service(namespace), service(namespace, "secret"), slice_)
    host = f"hello.{namespace}.svc.cluster.local"
    async with hgate_cluster(server, folder, allowing(namespace, services="[hell*]")) as cluster:
        await until(lambda: cluster.endpoints() == {host: {"80": ["10.1.0.1:8080", "10.1.0.3:8080"]}})
        await hands.apply({**slice_, "endpoints": ends[:1]})
        await until(lambda: cluster.endpoints() == {host: {"80": ["10.1.0.1:8080"]}})
        await hands.delete(slice_)
        await until(lambda: cluster.endpoints() == {})


async def test_a_killed_leader_is_replaced_within_its_lease(
    server: RealApiServer, hands: Hands, namespace: str, tmp_path: Path
) -> None:
    await hands.apply(service(namespace, cloudrun_url=URL))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with hgate_cluster(server, tmp_path / "a", allowing(namespace), name="a") as first:
        await first.process.said("^lease hgate: we write from now on$")
        async with hgate_cluster(server, tmp_path / "b", allowing(namespace), name="b") as second:
            await until_status(hands, namespace, f"^routed to {URL}/_hbone/15003$")
            await until(lambda: second.routes() != {})
            assert await second.metric("hbone_cluster_leader") == 0
            first.process.send(signal.SIGKILL)
            killed = time.monotonic()
            await second.process.said("^lease hgate: we write from now on$")
            assert time.monotonic() - killed < 17
            assert await second.metric("hbone_cluster_leader") == 1
            second.process.send(signal.SIGTERM)  # lets go of the lease
            assert (await second.process.ended())[0] == 0
    path = "/apis/coordination.k8s.io/v1/namespaces/istio-system/leases/hgate"
    lease = await hands.get(path)
    assert lease is not None and not lease["spec"].get("holderIdentity")


async def test_without_a_role_it_says_which_and_goes_on_when_there_is_one(
    server: RealApiServer, hands: Hands, namespace: str, folder: Path
) -> None:
    async with hgate_cluster(server, folder, allowing(namespace), token=server.forbidden) as cluster:
        told = await cluster.process.said("^services: ")
        assert "a Role has to allow us the verb list on services" in told.string
        ready = await cluster.get("/healthz/ready")
        assert ready.status == 503 and b"pending: list of services" in ready.body
        assert await cluster.metric("hbone_cluster_failures_total", "services", "403") >= 1
        name = f"reads-{namespace}"
        rule = {"apiGroups": ["*"], "resources": ["services", "serviceentries"], "verbs": ["list", "watch"]}
        user = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "guest"}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
        rbac = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": name}}
        granted = [
            {**rbac, "kind": "ClusterRole", "rules": [rule]},
            {**rbac, "kind": "ClusterRoleBinding", "roleRef": role, "subjects": [user]},
        ]
        await hands.apply(*granted)
        try:
            await cluster.process.said("^services: followed again")
            await until(lambda: (folder / "routes.json").exists())
            assert (await cluster.get("/healthz/ready")).status == 200
            allow = allowing(namespace, services="[hello]")
            (folder / "hgate-0.yaml").write_text(gateway_file(folder, allow))
            await cluster.process.said("^endpointslices: .* verb list on endpointslices")
            why = "a reload takes no pod out of rotation"
            assert (await cluster.get("/healthz/ready")).status == 200, why
            assert await cluster.metric("hbone_cluster_followed", "endpointslices") == 0
        finally:
            await hands.delete(*granted)


async def test_mesh_env_is_filled_and_follows(
    server: RealApiServer, hands: Hands, namespace: str, folder: Path
) -> None:
    def balanced(name: str, address: str = "") -> dict[str, Any]:
        found = service("istio-system", name)
        given = {"loadBalancer": {"ingress": [{"ip": address}]}} if address else {}
        return {**found, "spec": {**found["spec"], "type": "LoadBalancer"}, "status": given}

    def config_map(name: str, **data: str) -> dict[str, Any]:
        about = {"name": name, "namespace": "istio-system"}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data}

    async def mesh_env() -> dict[str, str]:
        found = await hands.get("/api/v1/namespaces/istio-system/configmaps/mesh-env")
        data: dict[str, str] = {} if found is None else found["data"]
        return data

    async def until_mesh_env(**wanted: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (found := await mesh_env()) != wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert found == wanted

    before = config_map("mesh-env", TRUST_DOMAIN="mine.example", OTHERS="1", MESH_TENANT="")
    istio = config_map("istio", mesh="trustDomain: theirs.example\n")
    root = {**config_map("istio-ca-root-cert"), "data": {"root-cert.pem": "ROOT"}}
    await hands.apply(before, istio, root, config_map("env-asm-managed", CLOUDRUN_ADDR="tenant.example"))
    await hands.apply(balanced("hgate"), balanced("internal-hgate"), balanced("hgate-istiod"))
    users = {"TRUST_DOMAIN": "mine.example", "OTHERS": "1", "MESH_TENANT": ""}
    told = {
        "project/project-id": "demo-project",
        "project/numeric-project-id": "1234567",
        "instance/attributes/cluster-name": "demo",
        "instance/attributes/cluster-location": "us-east1",
    }
    async with MetadataServer(lambda _: Answer(), texts=told) as metadata:
        known = {"GCE_METADATA_HOST": metadata.host}
        async with hgate_cluster(server, folder, "[]", environ=known, mesh_env="true") as cluster:
            await cluster.process.said("^mesh-env of istio-system: ")
            platform = {
                "PROJECT_ID": "demo-project",
                "PROJECT_NUMBER": "1234567",
                "CLUSTER_NAME": "demo",
                "CLUSTER_LOCATION": "us-east1",
            }
            ours = {**platform, "CAROOT_ISTIOD": "ROOT"}
            assert await mesh_env() == {**users, **ours}

            # The load balancers get their addresses, and a user takes a key over.
            await hands.status(balanced("hgate", "203.0.113.1"), balanced("internal-hgate", "10.9.0.1"))
            await hands.status(balanced("hgate-istiod", "10.9.0.2"))
            ours |= {"MCON_ADDR": "203.0.113.1", "IMCON_ADDR": "10.9.0.1", "XDS_ADDR": "10.9.0.2:15012"}
            await until_mesh_env(**users, **ours)  # else both write at once, and one has a conflict
            await hands.apply(config_map("mesh-env", **users, **{**ours, "CLUSTER_NAME": "theirs"}))
            await until_mesh_env(**{**users, **ours, "CLUSTER_NAME": "theirs"})
            await hands.status(balanced("internal-hgate", "10.9.0.9"))
            await until_mesh_env(**{**users, **ours, "CLUSTER_NAME": "theirs", "IMCON_ADDR": "10.9.0.9"})
            assert await cluster.metric("hbone_cluster_writes_total", "success", "mesh-env") >= 3


class Line:
    """A way to the API server that can be cut and mended, on one port."""

    def __init__(self, url: str) -> None:
        self._target = Address.parse(url.removeprefix("https://"))
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._target.host, self._target.port)
        self._writers |= {writer, far_writer}

        async def one_way(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                while read := await source.read(65536):
                    sink.write(read)
                    await sink.drain()
            sink.close()

        await asyncio.gather(one_way(reader, far_writer), one_way(far_reader, writer))
        self._writers -= {writer, far_writer}


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["one process", "workers"])
async def test_routes_and_tunnels_outlive_the_api_server(
    server: RealApiServer, hands: Hands, namespace: str, folder: Path, workers: tuple[str, ...]
) -> None:
    line = Line(server.url)
    await line.mend()
    async with (
        hgate_cluster(server, folder, allowing(namespace), url=line.url) as cluster,
        TcpServer.listening() as far_side,
    ):
        await until(lambda: (folder / "routes.json").exists())
        file = folder / "hgate-0.yaml"
        file.write_text(
            file.read_text().replace(
                "routes: []", f'routes: [{{host: far.example, forward: "127.0.0.1:{far_side.port}"}}]'
            )
        )
        async with hgate(file, *workers) as gateway, TcpPeer.connected(gateway.port) as client:
            await client.send(said := hello("far.example"))
            tunnel = await far_side.accept()
            assert await tunnel.read(len(said)) == said
            await hands.apply(service(namespace, cloudrun_url=URL))
            await gateway.said("^reload: 2 routes")

            line.cut()
            await cluster.process.said("^services: .*; what is known stays until it works again$")
            await hands.apply(service(namespace, "later", cloudrun_url=URL))
            assert len(cluster.routes()) == 1, "what is known stays"
            assert await cluster.metric("hbone_cluster_followed", "services") == 0
            assert await gateway.is_ready()

            await line.mend()
            await cluster.process.said("^services: followed again")
            await gateway.said("^reload: 3 routes")
            told = [one for one in cluster.process.messages if one.startswith("services: ")]
            assert len(told) == 2, "one line when it begins, one when it is over"

            await hands.delete(service(namespace), service(namespace, "later"))
            await gateway.said("^reload: 1 routes")
            await tunnel.send(b"open tunnels stay")
            assert await client.read(17) == b"open tunnels stay"
            client.end()
            assert await tunnel.rest() == b""
            tunnel.end()
            assert await client.rest() == b""
    line.cut()

"""Names of the cluster's Services, passed to their endpoints as they are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config import cluster_files, followed_list
from gateway.rules.cluster_rules import ServiceRoute
from gateway.sni.cluster_endpoints import ClusterEndpoints
from shared.address import Address
from shared.errors import DialError
from tests.support.cluster_process import gateway_file
from tests.support.gateway_output import answer_of
from tests.support.gateway_world import World
from tests.support.hellos import INTERNAL_ERROR, NAME, UNRECOGNIZED_NAME, alert, hello
from tests.support.network import closed_port
from tests.support.process import started
from tests.support.running_gateway import change_config
from tests.support.tcp_peer import PATIENCE_S, TcpServer

SERVICE = "hello.demo.svc.cluster.local"
NO_APPLICATION_PROTOCOL = alert(120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


async def following(folder: Path, services: dict[str, Any]) -> ClusterEndpoints:
    cluster_files.write_endpoints(folder, services)
    endpoints = ClusterEndpoints()
    await endpoints.follow(folder)
    return endpoints


async def test_the_next_endpoint_is_tried_when_one_refuses(folder: Path, target: TcpServer) -> None:
    gone, there = (f"127.0.0.1:{port}" for port in (closed_port(), target.port))
    endpoints = await following(folder, {SERVICE: {"80": [gone, there]}})
    for _ in range(8):  # by chance either is the first
        endpoint, sock = await endpoints.dial(Address(SERVICE, 80), PATIENCE_S)
        sock.close()
        assert str(endpoint) == there
    endpoints.close()


async def test_what_has_no_endpoint(folder: Path) -> None:
    gone = f"127.0.0.1:{closed_port()}"
    endpoints = await following(folder, {SERVICE: {"80": [gone]}})
    with pytest.raises(DialError, match=f"^{SERVICE}:80: connect to {gone}: connection refused$"):
        await endpoints.dial(Address(SERVICE, 80), PATIENCE_S)
    for name, port in ((SERVICE, 81), ("other.demo.svc.cluster.local", 80)):
        with pytest.raises(DialError, match="has no ready endpoint for this Service and port"):
            await endpoints.dial(Address(name, port), PATIENCE_S)
    endpoints.close()


async def test_the_list_is_followed_and_a_broken_one_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(followed_list, "WATCH_S", 0.01)
    endpoints = await following(folder, {SERVICE: {}})
    (folder / cluster_files.ENDPOINTS).write_text("{")
    async with asyncio.timeout(PATIENCE_S):
        while not caplog.messages:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert endpoints.value == {SERVICE: {}}
    assert caplog.messages[0].endswith("; the list stays as it is")
    endpoints.close()


async def test_mesh_clients_reach_a_service_and_no_other(
    world: World, folder: Path, target: TcpServer, tmp_path: Path
) -> None:
    cluster_files.write_endpoints(folder, {SERVICE: {"8080": [f"127.0.0.1:{target.port}"]}})
    cluster_files.write_routes(folder, [])
    gateway = await world.start()
    change_config(
        gateway.file,
        routes=[],
        cluster={"folder": str(folder), "allow": [{"namespace": "demo", "services": ["hel*"]}]},
    )
    gateway.reload()
    await gateway.records.match("^reload: 1 routes")
    client = await world.client(hello(NAME))
    upstream = await target.accept()
    await upstream.send(b"answer")
    assert await client.read(6) == b"answer"
    client.end()
    upstream.end()
    line = await gateway.line()
    assert (line["route"], line["dst.addr"]) == ("hel*.demo.svc.cluster.local", f"127.0.0.1:{target.port}")

    for name, alpn, told in (
        (NAME, ("h2",), NO_APPLICATION_PROTOCOL),
        (SERVICE, ("istio",), UNRECOGNIZED_NAME),
        (NAME.replace("8080", "9090"), ("istio",), INTERNAL_ERROR),
        (NAME.replace("_._.", "_.v1_."), ("istio",), UNRECOGNIZED_NAME),
        (NAME.replace("hello", "secret"), ("istio",), UNRECOGNIZED_NAME),
        (NAME.replace("demo", "prod"), ("istio",), UNRECOGNIZED_NAME),
    ):
        refused = await world.client(hello(name, alpn))
        assert await refused.rest() == told, name


async def test_a_route_of_the_cluster_needs_the_administrator_s_word(world: World, folder: Path) -> None:
    """The process at the API server may be somebody else's by now: what it hands over is judged again."""
    port = world.service.port
    asked = ServiceRoute(
        SERVICE, f"https://hello.example:{port}/_hbone/15003", "aud", "POST", "", "demo", "Service demo/hello"
    )
    cluster_files.write_routes(folder, [asked])
    gateway = await world.start()
    settings = {"folder": str(folder), "allow": [{"namespace": "demo", "hosts": ["**.run.app"]}]}
    change_config(gateway.file, routes=[], cluster=settings)
    gateway.reload()
    await gateway.records.match("^reload: 0 routes")
    assert await (await world.client(hello(NAME))).rest() == UNRECOGNIZED_NAME
    (folder / cluster_files.ROUTES).write_text(json.dumps({"routes": [{"host": "evil"}]}))
    await gateway.records.match("broken list in .*; the cluster's routes stay as they are")


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["one process", "workers"])
async def test_it_is_ready_when_the_first_list_is_there(
    tmp_path: Path, folder: Path, workers: tuple[str, ...]
) -> None:
    file = tmp_path / "hgate.yaml"
    file.write_text(gateway_file(folder, "[]"))
    async with started("gateway", "--config", str(file), "--log-format", "json", *workers) as process:
        port = int((await process.said(r"^health on 127\.0\.0\.1:(\d+)$"))[1])
        answer = await answer_of("health", port, "/healthz/ready")
        assert answer.status == 503
        cluster_files.write_routes(folder, [])
        await process.said("^all 2 workers are ready$" if workers else "^ready$")
        assert (await answer_of("health", port, "/healthz/ready")).status == 200

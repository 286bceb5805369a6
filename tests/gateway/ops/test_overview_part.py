"""What a running hgate says on its admin port, for its page and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.config import cluster_files
from gateway.ops import overview_part
from gateway.ops.overview import ROWS
from gateway.rules.cluster_rules import ServiceRoute
from shared.net import http1
from tests.support import reverse_port
from tests.support.gateway_load import EchoService, staying
from tests.support.gateway_world import GLOB, World, tunnel
from tests.support.hbone_port import GATEWAY, Mesh
from tests.support.hellos import NAME, hello
from tests.support.metadata_server import closed_port
from tests.support.reverse_port import NAME as NAME_OF_WORKLOAD
from tests.support.running_gateway import RunningGateway, change_config, running
from tests.support.tcp_peer import PATIENCE_S


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview_part, "KEPT_S", 0.0)


async def post(gateway: RunningGateway, path: str, **headers: str) -> http1.Response:
    url = f"http://127.0.0.1:{gateway._ports['admin']}{path}"
    return await http1.request("POST", url, headers=headers, timeout_s=PATIENCE_S, max_bytes=1 << 16)


async def test_a_tunnel_with_its_route_and_its_origin(world: World) -> None:
    gateway = await world.start()
    client, stream = await world.open()
    await world.echoes(client, stream)
    page = await gateway.dump("/overview")
    (shown,) = page["tunnels"]["rows"]
    assert (shown["from"], shown["name"], shown["state"]) == (client.address, NAME, "open")
    assert (shown["route"], shown["to"]) == (GLOB, f"127.0.0.1:{world.service.port}")
    assert (shown["bytes_sent"], shown["bytes_recv"]) == (len(hello()) + 5, 8)
    (route,) = page["routes"]["rows"]
    assert (route["host"], route["connections"], route["tunnels"]) == (GLOB, 1, 1)
    assert route["source"] == f"{gateway.file}:9", "as the file has it"
    assert gateway.file.read_text().splitlines()[8].strip() == "{"
    assert route["to"] == f"http://{{service}}.example/_hbone/15003 at 127.0.0.1:{world.service.port}"
    (origin,) = page["origins"]["rows"]
    assert (origin["connections"], origin["streams"], origin["failure"]) == (1, 1, "")
    assert page["totals"]["bytes_sent"] == route["bytes_sent"] == shown["bytes_sent"]
    assert (page["connections"], page["connections_limit"]) == (1, 10_000)
    assert (page["silent"], page["reload_is_good"], page["refusals"]) == ([], True, [])


async def test_each_kind_of_route_is_told(world: World) -> None:
    gateway = await world.start(
        {"host": "a", "forward": "127.0.0.1:5"},
        tunnel(1, host="b", tunnel="https://b.example/x", token={"audience": "https://b.example"}),
        tunnel(1, host="c", tunnel="http://[::1]:81/x", connect="127.0.0.1:1"),
    )
    page = await gateway.dump("/overview")
    told = [(row["kind"], row["to"].partition(" at ")[0], row["token"]) for row in page["routes"]["rows"]]
    assert told == [
        ("forward", "127.0.0.1:5", ""),
        ("tunnel, POST", "https://b.example/x", "audience https://b.example"),
        ("tunnel, POST", "http://[::1]:81/x", ""),
    ]


async def test_a_route_of_the_cluster_names_its_object(world: World, tmp_path: Path) -> None:
    gateway = await world.start()
    wanted = ServiceRoute(
        "fortio.demo.svc.cluster.local",
        *("https://fortio-1.a.run.app/_hbone/15003", "https://fortio-1.a.run.app", "POST", "", "demo"),
        "Service demo/fortio",
    )
    cluster_files.write_routes(tmp_path, [wanted])
    allow = [{"namespace": "demo", "hosts": ["*.a.run.app"]}, {"namespace": "fortio", "services": ["*"]}]
    change_config(gateway.file, cluster={"allow": allow, "folder": str(tmp_path)})
    gateway.reload()
    await gateway.records.match("^reload: 3 routes from ")
    rows = (await gateway.dump("/overview"))["routes"]["rows"]
    told = {row["source"]: (row["kind"], row["to"]) for row in rows[1:]}
    assert told["Service demo/fortio"] == ("tunnel, POST", "https://fortio-1.a.run.app/_hbone/15003")
    assert ("forward", "an endpoint of the Service that the name says") in told.values()
    routes = (await gateway.dump("/config_dump"))["config"]["routes"]
    assert [route["source"] for route in routes] == [row["source"] for row in rows]


async def test_an_origin_that_cannot_be_reached_stays_visible(world: World) -> None:
    port = closed_port()
    gateway = await world.start(tunnel(port))
    await (await world.client()).rest()
    page = await gateway.dump("/overview")
    (origin,) = page["origins"]["rows"]
    assert (origin["connections"], origin["failure"].rpartition(": ")[2]) == (0, "connection refused")
    (refused,) = page["refusals"]
    assert (refused["flag"], refused["count"]) == ("CONNECT", 1)
    assert refused["cases"][0]["message"].endswith("connection refused")


async def test_names_that_clients_invent_do_not_push_out_origins(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview_part, "FAILING_ROWS", 3)
    good = tunnel(world.service.port, host="hello.demo.svc.cluster.local")
    gateway = await world.start(good, tunnel(closed_port()))
    client, stream = await world.open()
    for number in range(5):
        await (await world.client(hello(f"invented-{number}.demo.svc.cluster.local"))).rest()
    origins = (await gateway.dump("/overview"))["origins"]
    assert origins["of"] == 6
    told = [row["origin"].partition(".example")[0].partition("://")[2] for row in origins["rows"]]
    assert told == ["invented-2", "invented-3", "invented-4", "hello"]
    assert [row["streams"] for row in origins["rows"]] == [0, 0, 0, 1]
    await world.echoes(client, stream)


async def test_workloads_that_have_registered_are_an_origin(tmp_path: Path) -> None:
    async with reverse_port.serving(tmp_path) as port, port.workload() as workload:
        ours, _ = await port.opened(workload)
        row = overview_part.workloads_row(NAME_OF_WORKLOAD, port.listener.names[NAME_OF_WORKLOAD])
        assert row["origin"] == f"reverse://{NAME_OF_WORKLOAD}"
        assert (row["connections"], row["streams"], row["failure"]) == (1, 1, "")
        ours.abort()


async def test_refusals_before_and_after_the_hello_and_a_tunnel_that_broke(world: World) -> None:
    gateway = await world.start()
    await (await world.client(b"GET / HTTP/1.1\r\n\r\n")).was_reset()
    for _ in range(2):
        await (await world.client(hello("other.example.com"))).rest()
    client, stream = await world.open()
    stream.reset(2)
    await client.was_reset()
    page = await gateway.dump("/overview")
    told = {
        one["flag"]: (one["count"], one["cases"][0]["name"], one["cases"][0]["was_open"])
        for one in page["refusals"]
    }
    assert told == {
        "NOT_TLS": (1, "", False),
        "NO_ROUTE": (2, "other.example.com", False),
        "UPSTREAM_RESET": (1, NAME, True),
    }
    assert {case["from"] for one in page["refusals"] for case in one["cases"]} == {"127.0.0.1"}
    assert page["routes"]["rows"][0]["failed"] == 1


async def test_a_name_that_would_be_markup_is_a_text_and_printable(world: World) -> None:
    gateway = await world.start()
    name = "<img/src=x/onerror=alert(1)>"
    await (await world.client(hello(name))).rest()
    response = await gateway.get("admin", "/overview")
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-content-type-options"] == "nosniff"
    (refused,) = json.loads(response.body)["refusals"]
    assert (refused["flag"], refused["cases"][0]["name"]) == ("BAD_SNI", name)


async def test_tokens_with_their_expiry(world: World) -> None:
    gateway = await world.start(tunnel(world.service.port, token={"audience": "https://a.example"}))
    client = await world.client()
    await world.service.request()
    (token,) = (await gateway.dump("/overview"))["tokens"]["rows"]
    assert token["audience"] == "https://a.example"
    assert 3500 < token["left_s"] <= 3600
    await client.close()


async def test_certificates_with_their_expiry(world: World, tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    settings = {"certificates": str(mesh.member(GATEWAY)), "listen": ["127.0.0.1:0"], "rules": []}
    async with running(tmp_path / "hgate.yaml", [tunnel(1)], hbone=settings) as gateway:
        page = await gateway.dump("/overview")
    (row,) = [row for row in page["certificates"]["rows"] if row["path"].startswith(str(tmp_path))]
    assert row["identity"] == str(GATEWAY)
    assert 0 < row["left_s"] < row["roots_left_s"]
    assert [row["kind"] for row in page["routes"]["rows"]] == ["HBONE port", "tunnel, POST"]


async def test_of_many_tunnels_those_that_carried_most_are_shown(tmp_path: Path) -> None:
    async with (
        EchoService.listening() as service,
        running(tmp_path / "hgate.yaml", [tunnel(service.port)]) as gateway,
        staying(gateway.port, ROWS + 10) as tunnels,
    ):
        busy = tunnels.clients[ROWS]
        await busy.send(b"x" * 1000)
        await busy.read(1000)
        page = await gateway.dump("/overview")
        assert (page["tunnels"]["of"], len(page["tunnels"]["rows"])) == (ROWS + 10, ROWS)
        assert page["tunnels"]["rows"][0]["from"] == busy.address
        assert page["totals"]["tunnels"] == ROWS + 10
        assert page["origins"]["rows"][0]["streams"] == ROWS + 10
        assert len(await gateway.dump("/tunnels")) == ROWS + 10, "all of them"


async def test_what_is_looked_for_is_found_among_all(world: World) -> None:
    port = world.service.port
    routes = [tunnel(port, host=f"{number}.other.svc") for number in range(ROWS)]
    gateway = await world.start(*routes, tunnel(port))
    client, _ = await world.open()
    page = await gateway.dump("/overview?find=HELLO.demo")
    assert [row["from"] for row in page["tunnels"]["rows"]] == [client.address]
    assert (page["routes"]["of"], page["totals"]["tunnels"]) == (0, 1), "numbers are of all"
    page = await gateway.dump("/overview?find=*.demo.svc")
    assert [row["host"] for row in page["routes"]["rows"]] == [GLOB], "not among the first"
    page = await gateway.dump("/overview?find=hello.example")
    assert [row["streams"] for row in page["origins"]["rows"]] == [1]
    page = await gateway.dump("/overview?find=nothing%00%0a%26like%20it")
    assert [page[name]["of"] for name in ("routes", "origins", "tunnels", "tokens")] == [0, 0, 0, 0]
    assert (await gateway.dump("/overview"))["routes"]["of"] == ROWS + 1


async def test_a_second_page_costs_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview_part, "KEPT_S", PATIENCE_S)
    gateway = await world.start()
    first = await gateway.dump("/overview")
    await (await world.client(b"no TLS")).rest()
    assert await gateway.dump("/overview") == first


# What programs ask.


async def test_the_configuration_in_effect_with_defaults_sources_and_nothing_secret(tmp_path: Path) -> None:
    environ = {
        "GCE_METADATA_HOST": "127.0.0.1:1",
        "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "secret-name.json"),
        "HBONE_TOKENS": "metadata",
    }
    async with running(tmp_path / "hgate.yaml", [tunnel(1)], environ=environ) as gateway:
        response = await gateway.get("admin", "/config_dump")
    told = json.loads(response.body)
    assert told["version"].startswith("hgate ")
    assert told["file"] == str(gateway.file)
    assert told["config"]["routes"][0]["source"] == f"{gateway.file}:9"
    assert told["config"]["limits"]["max_connections"] == 10_000, "a default"
    assert told["config"]["tokens"]["metadata_host"] == "127.0.0.1:1", "of the environment"
    assert told["config"]["tokens"]["credentials"] == "(set)"
    assert b"secret-name" not in response.body


async def test_the_page_and_what_it_needs_are_served(world: World) -> None:
    gateway = await world.start()
    for path, content_type in (
        ("/", "text/html"),
        ("/page.css", "text/css"),
        ("/page.js", "text/javascript"),
    ):
        response = await gateway.get("admin", path)
        assert (response.status, response.headers["content-type"].partition(";")[0]) == (200, content_type)
        assert "default-src 'none'" in response.headers["content-security-policy"]


async def test_only_a_post_changes_the_log_level_and_none_of_another_site(world: World) -> None:
    gateway = await world.start()
    assert (await gateway.get("admin", "/logging")).body == b"debug\n", "as the test has set it"
    assert (await gateway.get("admin", "/logging?level=error")).status == 400
    assert (await post(gateway, "/logging")).status == 400
    for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}):
        assert (await post(gateway, "/logging?level=error", **headers)).status == 403
    assert (await gateway.get("admin", "/logging")).body == b"debug\n"
    assert (await post(gateway, "/logging?level=info")).body == b"info\n"
    assert (await gateway.get("admin", "/logging")).body == b"info\n"
    for path in ("/", "/overview", "/config_dump", "/connections", "/certs", "/tunnels", "/tokens"):
        assert (await post(gateway, path)).status == 405

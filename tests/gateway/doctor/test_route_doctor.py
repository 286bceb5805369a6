"""`hgate doctor` in this process: what becomes of each kind of route."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config import cluster_files
from gateway.doctor import route_doctor
from gateway.doctor.route_doctor import GatewayReport, RouteReport, examine
from gateway.rules.cluster_rules import ServiceRoute
from gateway.rules.hbone_rules import Rule
from shared.doctor.failures import Failure
from shared.doctor.service_path import Deadlines
from shared.doctor.walk import Verdict
from shared.trust.spiffe import SpiffeId
from tests.support import hbone_port
from tests.support.hbone_port import CALLER, GATEWAY, TRUST_DOMAIN, HbonePort
from tests.support.metadata_server import closed_port
from tests.support.running_gateway import change_config, write_config
from tests.support.tcp_peer import TcpServer

DEADLINES = Deadlines(20.0, 20.0)
HOST = "hello.demo.svc.cluster.local"
STRANGER = SpiffeId.of_workload(TRUST_DOMAIN, "other", "stranger")


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[HbonePort]:
    rule = Rule((str(CALLER),), ("127.0.0.0/8:*",))
    async with hbone_port.serving(tmp_path / "mesh", rule) as port:
        yield port


async def looked(
    folder: Path, *routes: dict[str, Any], names: tuple[str, ...] = (), **fields: Any
) -> GatewayReport:
    file = folder / "hgate.yaml"
    write_config(file, routes)
    change_config(file, **fields)
    return await examine(file, names, {}, DEADLINES)


def failure_of(one: RouteReport) -> Failure | None:
    assert one.report is not None
    return None if one.report.failed is None else one.report.failed.failure


def in_mesh(port: HbonePort, target: int, who: SpiffeId = CALLER, **fields: Any) -> dict[str, Any]:
    """A route to an HBONE port, as who."""
    return {
        "host": HOST,
        "tunnel": f"https://127.0.0.1:{port.port}",
        "method": "CONNECT",
        "authority": f"127.0.0.1:{target}",
        "identity": str(port.mesh.member(who)),
        "peer": [str(GATEWAY)],
    } | fields


async def test_a_member_of_the_mesh(tmp_path: Path, port: HbonePort, target: TcpServer) -> None:
    report = await looked(tmp_path, in_mesh(port, target.port))
    (one,) = report.routes
    assert failure_of(one) is None, route_doctor.as_text(report, colour=False)
    assert one.report is not None
    details = {result.name: result.detail for result in one.report.results}
    assert str(GATEWAY) in details["tls"]
    assert details["dial"] == f"127.0.0.1:{target.port} is open"
    assert {details[name] for name in ("token", "front end", "krun")} == {"a member of the mesh"}


async def test_a_member_that_is_another(tmp_path: Path, port: HbonePort, target: TcpServer) -> None:
    report = await looked(tmp_path, in_mesh(port, target.port, peer=[str(STRANGER)]))
    assert failure_of(report.routes[0]) is Failure.PEER_IDENTITY
    assert report.exit_code == Failure.PEER_IDENTITY.hop.exit_code


async def test_a_member_that_does_not_allow_us(tmp_path: Path, port: HbonePort, target: TcpServer) -> None:
    report = await looked(tmp_path, in_mesh(port, target.port, STRANGER))
    assert failure_of(report.routes[0]) is Failure.POLICY_DENIED


async def test_a_member_that_does_not_reach_the_target(tmp_path: Path, port: HbonePort) -> None:
    report = await looked(tmp_path, in_mesh(port, closed_port()))
    assert failure_of(report.routes[0]) is Failure.TARGET_REFUSED


async def test_our_own_certificates_are_missing(tmp_path: Path, port: HbonePort) -> None:
    report = await looked(tmp_path, in_mesh(port, 1, identity=str(tmp_path)))
    assert failure_of(report.routes[0]) is Failure.OWN_CERTIFICATE


async def test_what_cannot_be_walked_is_skipped(tmp_path: Path) -> None:
    templated = {"host": f"*.{HOST}", "tunnel": "http://127.0.0.1:{port}/x"}
    report = await looked(tmp_path, templated)
    (one,) = report.routes
    assert (one.verdict, one.reason) == (Verdict.SKIP, route_doctor.DEPENDS)
    assert report.exit_code == 0


async def test_a_bare_name_fills_a_template(tmp_path: Path) -> None:
    """The host of the route says all that the template needs."""
    route = {"host": HOST, "tunnel": f"http://{{host}}:{closed_port()}/x", "connect": "127.0.0.1:1"}
    report = await looked(tmp_path, route)
    assert failure_of(report.routes[0]) is Failure.TCP_REFUSED


async def test_many_routes_each_in_its_row(tmp_path: Path) -> None:
    async with TcpServer.listening() as server:
        routes = [{"host": f"h{n}.example", "forward": f"127.0.0.1:{server.port}"} for n in range(20)]
        report = await looked(tmp_path, *routes)
        for _ in routes:
            await server.accept()
    assert [one.name for one in report.routes] == [f"h{n}.example" for n in range(20)]
    assert {one.verdict for one in report.routes} == {Verdict.PASS}


async def test_the_clusters_routes(tmp_path: Path) -> None:
    """They are walked behind the file's; that they are not known yet is told."""
    cluster = {"folder": str(tmp_path), "allow": [{"namespace": "demo", "hosts": ["*.a.run.app"]}]}
    report = await looked(tmp_path, cluster=cluster)
    assert (report.awaits_cluster, report.routes) == (True, ())

    url = "https://hello-1.a.run.app"
    wanted = ServiceRoute(HOST, f"{url}/_hbone/15003", url, "POST", "", "demo", "Service demo/hello")
    cluster_files.write_routes(tmp_path, [wanted])
    report = await looked(
        tmp_path,
        cluster=cluster,
        tokens={"source": "metadata", "metadata_host": f"127.0.0.1:{closed_port()}"},
    )
    assert not report.awaits_cluster
    (one,) = report.routes
    assert (one.place, one.name) == ("route of Service demo/hello", HOST)
    assert failure_of(one) is Failure.NO_TOKEN, "there is nobody to ask here"


async def test_names_that_are_given(tmp_path: Path) -> None:
    route = {"host": "**", "forward": f"127.0.0.1:{closed_port()}", "alpn": "any"}
    report = await looked(tmp_path, route, names=("a.example", "b.example."))
    assert [one.name for one in report.routes] == ["a.example", "b.example."]
    assert report.exit_code == Failure.TCP_REFUSED.hop.exit_code
    told = route_doctor.as_object(report)
    assert list(told) == ["file", "ok", "exit_code", "routes"]
    keys = ["route", "name", "leads_to", "verdict", "reason", "report"]
    assert [list(one) for one in told["routes"]] == [keys, keys]
    assert json.dumps(told)
    text = route_doctor.as_text(report, colour=False)
    assert text.count("FAIL: tcp: TCP_REFUSED") == 2

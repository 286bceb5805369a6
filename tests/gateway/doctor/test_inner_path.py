"""`hgate doctor` inside of a tunnel: krun's own port, and behind it TLS of the ssl module's."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.config.settings import Settings
from gateway.cli import authority
from gateway.doctor import route_doctor
from gateway.doctor.route_doctor import RouteReport, examine
from shared.address import Address
from shared.doctor.failures import Failure
from shared.doctor.service_path import Deadlines
from shared.doctor.walk import Verdict
from shared.net.tls import certificate_folder
from shared.trust.spiffe import SpiffeId
from tests.support.hbone_port import GATEWAY, TRUST_DOMAIN, Mesh
from tests.support.krun_port import KrunPort
from tests.support.running_gateway import change_config, write_config
from tests.support.tcp_peer import TcpServer

HOST = "db.prod.svc.cluster.local"
AUTHORITY = f"{HOST}:5432"
DATABASE = SpiffeId.of_workload(TRUST_DOMAIN, "prod", "db")
OTHER = SpiffeId.of_workload(TRUST_DOMAIN, "prod", "other")
PATIENT = Deadlines(20.0, 20.0)

App = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def wait_for_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    assert await reader.read() == b""
    writer.close()


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello\n")
    await wait_for_the_end(reader, writer)


@pytest.fixture
def mesh(tmp_path: Path) -> Mesh:
    return Mesh(tmp_path / "mesh")


@asynccontextmanager
async def tls_end(mesh: Mesh, app: App = greet, trusted: Mesh | None = None) -> AsyncIterator[Address]:
    """An app's end of the mesh's TLS, which lets in those whom `trusted` (its own mesh) knows."""
    chain, key, _ = certificate_folder.find(mesh.member(DATABASE)).all
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=(trusted or mesh).authority.root_pem.decode())
    context.load_cert_chain(chain, key)
    context.set_alpn_protocols(["istio"])
    async with await asyncio.start_server(app, "127.0.0.1", 0, ssl=context) as server:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])


async def looked(
    mesh: Mesh,
    end: Address,
    *,
    wanted: SpiffeId = DATABASE,
    deadlines: Deadlines = PATIENT,
    asked: str = AUTHORITY,
    **fields: Any,
) -> RouteReport:
    """What becomes of a plain member's way to what ends the TLS at `end`."""
    async with KrunPort.serving(Settings(targets={"TLS": end})) as krun:
        route = {
            "host": HOST,
            "tunnel": "http://db.example/_hbone/TLS",
            "connect": f"127.0.0.1:{krun.port}",
            "token": "none",
            "inner": "none",
            "peer": [str(wanted)],
        }
        file = mesh.member(GATEWAY).parent / "hgate.yaml"
        told = route | fields
        write_config(file, [{name: value for name, value in told.items() if value is not None}])
        change_config(file, hbone={"certificates": str(mesh.member(GATEWAY)), "rules": []})
        report = await examine(file, (), {}, deadlines, authorities=[authority(asked)])
        (one,) = report.routes
        assert one.report is not None, route_doctor.as_text(report, colour=False)
        return one


def failed(one: RouteReport) -> tuple[Failure | None, str]:
    assert one.report is not None and one.report.failed is not None
    return one.report.failed.failure, one.report.failed.detail


def details(one: RouteReport) -> dict[str, str]:
    assert one.report is not None and one.verdict is Verdict.PASS, one.report
    return {result.name: result.detail for result in one.report.results}


async def test_an_app_that_speaks_first(mesh: Mesh) -> None:
    async with tls_end(mesh) as end:
        told = details(await looked(mesh, end))
    assert told["dial"] == "/_hbone/TLS is open"
    assert told["peer"].startswith(f"{DATABASE}, certificate until ")
    assert told["policy"] == "the app speaks first"


async def test_an_app_that_waits(mesh: Mesh) -> None:
    """It sees an orderly end, and no bytes."""
    ended = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await wait_for_the_end(reader, writer)
        ended.set()

    async with tls_end(mesh, wait) as end:
        told = details(await looked(mesh, end))
        async with asyncio.timeout(PATIENT.hop_s):
            await ended.wait()
    assert told["policy"] == "not refused within 1 s"


async def test_another_server(mesh: Mesh) -> None:
    async with tls_end(mesh) as end:
        failure, detail = failed(await looked(mesh, end, wanted=OTHER))
    assert failure is Failure.PEER_IDENTITY
    assert str(DATABASE) in detail


async def test_a_server_that_does_not_know_us(mesh: Mesh, tmp_path: Path) -> None:
    async with tls_end(mesh, trusted=Mesh(tmp_path / "strangers")) as end:
        failure, detail = failed(await looked(mesh, end))
    assert failure is Failure.POLICY_DENIED
    assert detail.startswith("after the handshake: ")


async def test_what_speaks_no_tls(mesh: Mesh) -> None:
    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        end = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        failure, detail = failed(await looked(mesh, end))
    assert failure is Failure.PEER_FAILED
    assert "inside the tunnel: " in detail


async def test_a_server_that_says_nothing(mesh: Mesh, target: TcpServer) -> None:
    one = await looked(mesh, Address("127.0.0.1", target.port), deadlines=Deadlines(0.3, 20.0))
    assert failed(one)[0] is Failure.PEER_FAILED


async def test_our_own_certificates_are_missing(mesh: Mesh, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    async with tls_end(mesh) as end:
        failure, detail = failed(await looked(mesh, end, identity=str(tmp_path / "none")))
    assert failure is Failure.OWN_CERTIFICATE
    assert str(tmp_path / "none") in detail


async def test_an_authority_that_no_route_takes(mesh: Mesh) -> None:
    one = await looked(mesh, Address("127.0.0.1", 9), asked="other.prod.svc.cluster.local:5432")
    assert failed(one)[0] is Failure.NO_ROUTE


async def test_the_clients_own_tls_is_not_looked_into(mesh: Mesh, target: TcpServer) -> None:
    """With `inner: tls` the walk ends where the client's handshake would begin."""
    own: dict[str, Any] = {"inner": "tls", "peer": None}
    told = details(await looked(mesh, Address("127.0.0.1", target.port), **own))
    assert list(told)[-1] == "dial"

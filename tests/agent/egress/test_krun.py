"""krun as a process with a way into the mesh: what it shows of it, its metrics, its drain, its start."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from shared.errors import EXIT_OK, EXIT_UNAVAILABLE
from tests.agent.ops.test_ops import Krun, krun
from tests.support.hbone_port import CALLER, GATEWAY, HbonePort, Mesh, serving
from tests.support.process import started
from tests.support.tcp_peer import TcpPeer, TcpServer


@asynccontextmanager
async def way(folder: Path) -> AsyncIterator[tuple[Krun, HbonePort, TcpServer, int]]:
    """krun beside an app, its gateway, the target, and the local port that leads there."""
    mesh = Mesh(folder)
    async with TcpServer.listening() as target, serving(folder, mesh=mesh) as gateway:
        told = {
            "HBONE_CERTS": str(mesh.member(CALLER)),
            "HBONE_EGRESS": f"0=localhost:{target.port}",
            "HBONE_EGRESS_GATEWAY": f"127.0.0.1:{gateway.port}",
            "HBONE_EGRESS_PEER": str(GATEWAY),
            "HBONE_EGRESS_ALLOW": "127.0.0.0/8:*",
            "HBONE_EGRESS_PROXY": "127.0.0.1:0",
        }
        async with krun(**told) as it:
            await it.find_ports()
            port = int((await it.process.said(r"^egress: 127.0.0.1:(\d+) leads to localhost:"))[1])
            await it.tunnel_port()
            yield it, gateway, target, port


async def test_what_is_open_is_shown_and_counted(tmp_path: Path) -> None:
    async with way(tmp_path) as (it, gateway, target, port):
        before = (await it.shown("/status"))["egress"]
        assert before["gateway"]["connections"] == 0
        async with TcpPeer.connected(port) as client:
            peer = await target.accept()
            await client.send(b"12345")
            assert await peer.read(5) == b"12345"
            shown = (await it.shown("/status"))["egress"]
            assert shown["gateway"]["address"] == f"127.0.0.1:{gateway.port}"
            assert (shown["gateway"]["peers"], shown["gateway"]["connections"]) == ([str(GATEWAY)], 1)
            assert shown["ports"] == [{"listen": f"127.0.0.1:{port}", "target": f"localhost:{target.port}"}]
            assert (shown["allow"], shown["deny"], shown["open"]) == (["127.0.0.0/8:*"], [], 1)
            (row,) = await it.shown("/tunnels")
            assert (row["target"], row["state"], row["bytes_sent"]) == (f"localhost:{target.port}", "open", 5)
            (connection,) = await it.shown("/connections")
            assert (connection["peer"], connection["streams"]) == (f"127.0.0.1:{gateway.port}", 1)
            now = await it.samples()
            assert now['hbone_tunnels_open{route="egress/local"}'] == 1
            assert now['hbone_sent_bytes_total{route="egress/local"}'] == 5
            assert (now["hbone_egress_connections_open"], now["hbone_egress_connections_limit"]) == (1, 1000)
            client.end()
            peer.end()
            assert await client.rest() == b""
        then = await it.samples()
        assert then['hbone_tunnels_closed_total{flags="-",route="egress/local"}'] == 1
        origin = f'origin="127.0.0.1:{gateway.port}"'
        assert then[f"hbone_upstream_connections_opened_total{{{origin}}}"] == 1
        it.process.send(signal.SIGTERM)
        code, _, said = await it.process.ended()
        assert code == EXIT_OK
        [line] = [json.loads(text) for text in said.splitlines() if "tunnel.target" in text]
        assert (line["route"], line["tunnel.target"]) == ("egress/local", f"localhost:{target.port}")
        assert (line["flags"], line["traceparent"]) == ("-", (await gateway.line())["traceparent"])


async def test_a_drain_waits_for_the_tunnels_of_an_app_that_somebody_else_has_started(tmp_path: Path) -> None:
    async with way(tmp_path) as (it, _, target, port):
        proxy = (await it.shown("/status"))["egress"]["proxy"]
        # A client that keeps its connection to the proxy for a request to come keeps nobody waiting.
        async with TcpPeer.connected(port) as client, TcpPeer.connected(int(proxy.rpartition(":")[2])):
            peer = await target.accept()
            it.process.send(signal.SIGTERM)
            await it.process.said("^draining: ")
            await client.send(b"last words")
            assert await peer.read(10) == b"last words"
            client.end()
            peer.end()
            assert await client.rest() == b""
        assert (await it.process.ended())[0] == EXIT_OK


async def refusal(**environ: str) -> str:
    """Why krun does not start."""
    told = {
        "HBONE_INBOUND": "none",
        "HBONE_STARTUP_PROBE": "-",
        "HBONE_LISTEN": "127.0.0.1:0",
        "HBONE_EGRESS_GATEWAY": "127.0.0.1:1",
        **environ,
    }
    async with started("agent", environ=told) as process:
        code, _, said = await process.ended()
    assert code == EXIT_UNAVAILABLE, said
    return said


async def test_krun_does_not_start_without_certificates(tmp_path: Path) -> None:
    assert str(tmp_path) in await refusal(HBONE_EGRESS="0=db:1", HBONE_CERTS=str(tmp_path))


async def test_krun_does_not_start_without_its_ports(tmp_path: Path) -> None:
    certificates = str(Mesh(tmp_path).member(CALLER))
    async with TcpServer.listening() as taken:
        said = await refusal(HBONE_EGRESS=f"{taken.port}=db:1", HBONE_CERTS=certificates)
        assert f"egress: cannot listen on 127.0.0.1:{taken.port}: the port is in use" in said

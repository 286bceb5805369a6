"""krun's ports for operators, of whole processes: what they say in a start, while krun serves, at its end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.errors import DialError
from shared.net.http1 import Response, get
from shared.tasks import spawn
from shared.trust.spiffe import SpiffeId
from tests.agent.ops.scrapes import samples
from tests.support.ambient_client import AmbientClient, InStream
from tests.support.hbone_port import CALLER, TRUST_DOMAIN, Mesh
from tests.support.http2_peer import Http2Peer
from tests.support.krun_port import answered_and_ended
from tests.support.metadata_server import closed_port
from tests.support.process import Process, started
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer
from tests.support.world import find_envoy

ANY_PORT = "127.0.0.1:0"
PORTS = {"HBONE_HEALTH": ANY_PORT, "HBONE_METRICS": ANY_PORT, "HBONE_ADMIN": ANY_PORT}


class Krun:
    """A krun of a test, and its ports by name."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.ports: dict[str, str] = {}

    async def find_ports(self) -> None:
        for name in ("health", "metrics", "admin"):
            self.ports[name] = (await self.process.said(rf"^{name} on (\S+)$"))[1]

    async def ask(self, name: str, path: str) -> Response:
        """What the port `name` answers."""
        url = f"http://{self.ports[name]}{path}"
        return await get(url, headers={}, timeout_s=PATIENCE_S, max_bytes=1 << 24)

    async def health(self) -> tuple[int, str]:
        answer = await self.ask("health", "/healthz/ready")
        return answer.status, answer.body.decode().strip()

    async def shown(self, path: str) -> Any:
        """What the admin port shows."""
        return json.loads((await self.ask("admin", path)).body)

    async def samples(self) -> dict[str, float]:
        return samples((await self.ask("metrics", "/stats/prometheus")).body)

    async def tunnel_port(self) -> int:
        return int((await self.process.said(r"^tunnels on .*:(\d+)$"))[1])


@asynccontextmanager
async def krun(*command: str, **environ: str) -> AsyncIterator[Krun]:
    told = {
        "HBONE_LISTEN": ANY_PORT,
        "HBONE_INBOUND": "none",
        "HBONE_INBOUND_LISTEN": ANY_PORT,
        "HBONE_ENVOY_ADMIN": ANY_PORT,
        "HBONE_APP": f"127.0.0.1:{closed_port()}",
        "HBONE_LOG_FORMAT": "json",
        **PORTS,
        **environ,
    }
    if not command:
        told["HBONE_STARTUP_PROBE"] = "-"
    async with started("agent", *command, environ=told) as process:
        yield Krun(process)


async def test_readiness_names_what_is_pending_until_the_last_step_is_done() -> None:
    port = closed_port()
    script = f"server = socket.create_server(('127.0.0.1', {port})); [*iter(server.accept, None)]"
    async with TcpServer.listening() as gate:
        wait = f"import socket; socket.create_connection(('127.0.0.1', {gate.port})).recv(1); "
        command = ("python3", "-c", wait + script)
        async with krun(*command, HBONE_APP=f"127.0.0.1:{port}") as it:
            await it.find_ports()
            app = await gate.accept()
            assert await it.health() == (503, "not ready, pending: app, tunnels")
            assert (await it.ask("health", "/healthz/live")).status == 200
            await app.send(b"x")
            await it.process.said("^started in ")
            assert await it.health() == (200, "ready")
            steps = (await it.shown("/status"))["started_s"]
            assert list(steps) == ["identity", "mTLS end", "app"]
            assert (await it.samples())['hbone_start_seconds{step="app"}'] >= 0
            it.process.send(signal.SIGTERM)
            await it.process.ended()


async def test_readiness_ends_with_the_drain() -> None:
    async with TcpServer.listening() as far, krun(PORT_FAR=f"127.0.0.1:{far.port}") as it:
        await it.find_ports()
        async with Http2Peer.connected(await it.tunnel_port()) as peer:
            stream = peer.request(b"POST", b"/_hbone/FAR")
            assert await stream.status() == 200
            it.process.send(signal.SIGTERM)
            await it.process.said("^draining: ")
            assert await it.health() == (503, "draining")
            stream.end()
            (await far.accept()).end()
            assert await stream.rest() == b""


async def test_tunnels_are_counted_while_they_carry() -> None:
    async with TcpServer.listening() as far, krun(PORT_FAR=f"127.0.0.1:{far.port}") as it:
        await it.find_ports()
        async with Http2Peer.connected(await it.tunnel_port()) as peer:
            stream = peer.request(b"POST", b"/_hbone/FAR")
            await stream.send(b"12345")
            app = await far.accept()
            assert await app.read(5) == b"12345"
            now = await it.samples()
            assert now['hbone_tunnels_open{route="FAR"}'] == 1
            assert now['hbone_sent_bytes_total{route="FAR"}'] == 5
            assert now["hbone_connections_open"] == 1
            (tunnel,) = await it.shown("/tunnels")
            assert (tunnel["target"], tunnel["state"], tunnel["bytes_sent"]) == ("FAR", "open", 5)
            (connection,) = await it.shown("/connections")
            assert connection["streams"] == 1
            stream.end()
            await app.send(b"123")
            app.end()
            assert await stream.rest() == b"123"
            assert await peer.request(b"POST", b"/_hbone/NOWHERE").status() == 404
            assert await peer.request(b"GET", b"/", end=True).status() == 503
            then = await it.samples()
        assert then['hbone_tunnels_open{route="FAR"}'] == 0
        assert then['hbone_tunnels_opened_total{route="FAR"}'] == 1
        assert then['hbone_tunnels_closed_total{flags="-",route="FAR"}'] == 1
        assert then['hbone_received_bytes_total{route="FAR"}'] == 3
        assert then['hbone_connections_refused_total{flags="NO_ROUTE"}'] == 1
        assert then['hbone_app_requests_failed_total{status="503"}'] == 1


async def test_inner_hbone_is_counted_and_shown(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    hello = mesh.member(SpiffeId.of_workload(TRUST_DOMAIN, "demo", "hello"))
    async with TcpServer.listening() as app:
        told = {"HBONE_INBOUND": "builtin", "HBONE_CERTS": str(hello), "WORKLOAD_NAME": "hello"}
        async with krun(**told, HBONE_APP=f"127.0.0.1:{app.port}") as it:
            await it.find_ports()
            assert (await it.samples())["hbone_inner_connections_limit"] == 1000
            async with Http2Peer.connected(await it.tunnel_port()) as front:
                post = front.request(b"POST", b"/_hbone/15008")
                assert await post.status() == 200
                await it.process.said(
                    r"^inner HBONE, target of /_hbone/15008: for hello\.demo\.svc\.cluster\.local"
                )
                async with AmbientClient.inside(InStream(post), mesh.tls(mesh.member())) as client:
                    tunnel = client.connect("hello.demo.svc.cluster.local:80")
                    there = await app.accept()
                    await tunnel.send(b"12345")
                    assert await there.read(5) == b"12345"
                    other = client.connect("other:80")
                    assert await other.status() == 401
                    other.end()
                    now = await it.samples()
                    assert now["hbone_inner_connections_open"] == 1
                    assert now['hbone_tunnels_open{route="hbone"}'] == 1
                    assert now['hbone_tunnels_open{route="15008"}'] == 1
                    assert now['hbone_sent_bytes_total{route="hbone"}'] == 5
                    assert now['hbone_connections_refused_total{flags="DENY"}'] == 1
                    outer, inner = sorted(await it.shown("/tunnels"), key=lambda one: one["target"])
                    assert (outer["target"], outer["address"], outer["identity"]) == ("15008", None, None)
                    assert (inner["target"], inner["identity"]) == (
                        "hello.demo.svc.cluster.local:80",
                        str(CALLER),
                    )
                    _, row = await it.shown("/connections")
                    assert (row["identity"], row["streams"]) == (str(CALLER), 1)
                    it.process.send(signal.SIGTERM)
                    await client.peer.until(lambda: client.peer.goaway)
                    await answered_and_ended(tunnel, there)
                    await client.transport.ended.wait()
                    client.close()
            assert (await it.process.ended())[0] == 0


async def test_one_scrape_has_envoy_s_metrics_and_the_app_s(tmp_path: Path) -> None:
    find_envoy()
    async with TcpServer.listening() as app:
        url = f"http://127.0.0.1:{app.port}/metrics?a=1"
        told = {"HBONE_INBOUND": "envoy", "HBONE_CERTS": str(Mesh(tmp_path).member())}
        async with krun(**told, HBONE_APP_METRICS=url) as it:
            await it.find_ports()
            await it.process.said("^started in ")
            asked = spawn(it.samples(), name="scrape")
            there = await app.accept()
            head = await there.read_until(b"\r\n\r\n")
            assert head.startswith(b"GET /metrics?a=1 HTTP/1.1\r\n")
            body = b'process_cpu_seconds_total 7\nx{y="# EOF"} 1\n# EOF'
            await there.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            found = await asked
            assert found["process_cpu_seconds_total"] == 7, "the app's"
            assert found['x{y="# EOF"}'] == 1
            assert found["krun_process_cpu_seconds_total"] > 0
            assert found["envoy_server_live{}"] == 1
            assert found['hbone_scrape_failures_total{of="app"}'] == 0
            it.process.send(signal.SIGTERM)
            await it.process.ended()


async def test_who_does_not_answer_a_scrape_is_left_out_and_named() -> None:
    url = f"http://127.0.0.1:{closed_port()}/metrics"
    async with krun(HBONE_APP_METRICS=url) as it:
        await it.find_ports()
        await it.samples()
        assert (await it.samples())['hbone_scrape_failures_total{of="app"}'] == 2
        await it.process.said(r"^a scrape lacks the metrics of app \(HBONE_APP_METRICS\): .*refused")


async def test_an_envoy_that_does_not_answer_is_not_ready(tmp_path: Path) -> None:
    find_envoy()
    told = {"HBONE_INBOUND": "envoy", "HBONE_CERTS": str(Mesh(tmp_path).member())}
    async with krun(**told) as it:
        await it.find_ports()
        await it.process.said("^started in ")
        shown = (await it.shown("/status"))["mtls_end"]
        assert (shown["kind"], shown["deny"]) == ("envoy", [])
        assert [one.endswith("/**") for one in shown["allow"]] == [True], "its own trust domain"
        envoy = _child_of(it.process.pid)
        os.kill(envoy, signal.SIGSTOP)
        assert await it.health() == (503, "not ready, pending: mTLS end")
        os.kill(envoy, signal.SIGCONT)
        assert await it.health() == (200, "ready")
        os.kill(envoy, signal.SIGKILL)
        await it.process.said("envoy is ready again")
        assert await it.health() == (200, "ready")
        assert (await it.samples())["hbone_mtls_end_restarts_total"] == 1
        it.process.send(signal.SIGTERM)
        await it.process.ended()


def _child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


async def test_the_admin_port_shows_settings_and_no_web_page(tmp_path: Path) -> None:
    async with krun() as it:
        await it.find_ports()
        config = {row["variable"]: row for row in await it.shown("/config")}
        assert config["HBONE_INBOUND"] == {
            "variable": "HBONE_INBOUND",
            "value": "none",
            "origin": "environment",
        }
        assert set(await it.shown("/debug")) == {"status", "config", "tunnels", "connections", "certs", "ssh"}
        host, _, port = it.ports["admin"].rpartition(":")
        peer = await TcpPeer.connect(int(port))
        await peer.send(b"GET /config HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        assert (await peer.read_until(b"\r\n")).startswith(b"HTTP/1.1 403 ")
        await peer.close()
        assert host == "127.0.0.1"


async def test_a_port_that_somebody_has_named_has_to_be_there() -> None:
    async with TcpServer.listening() as taken:
        address = f"127.0.0.1:{taken.port}"
        async with krun(HBONE_HEALTH=address) as it:
            code, _, err = await it.process.ended()
    assert code == 69
    assert f"krun: health: cannot listen on {address}: the port is in use" in err


async def test_a_default_port_that_is_in_use_is_done_without() -> None:
    """As two kruns in one instance: Cloud Run's containers share their loopback."""
    ours = {"HBONE_HEALTH": "", "HBONE_METRICS": ANY_PORT, "HBONE_ADMIN": ANY_PORT}
    async with krun(**ours) as first:
        said = await first.process.said(
            r"^(health on 0\.0\.0\.0:15021|no health port: health: cannot listen)"
        )
        async with krun(**ours) as second:
            await second.process.said(r"^no health port: .* in use: set HBONE_HEALTH to another, or to -$")
            await second.tunnel_port()
        assert said


async def test_none_is_opened_if_none_is_wanted() -> None:
    off = dict.fromkeys(PORTS, "-")
    async with krun(**off) as it:
        await it.tunnel_port()
        with pytest.raises(DialError):
            await get("http://127.0.0.1:15019/", headers={}, timeout_s=1, max_bytes=1)

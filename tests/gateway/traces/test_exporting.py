"""Tunnels of a running gateway come to a receiver as spans; whatever that does, tunnels do not notice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from gateway.rules.hbone_rules import Rule
from gateway.traces import exporting
from gateway.traces.spans import SpanPipe
from shared.errors import EXIT_OK
from tests.support import hbone_port
from tests.support.gateway_world import GLOB, World, tunnel
from tests.support.hbone_port import CALLER
from tests.support.hellos import hello
from tests.support.hgate_process import hgate
from tests.support.metadata_server import closed_port
from tests.support.running_gateway import running, write_config
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer
from tests.support.trace_collector import Collector, Span, collecting

CLIENT, SERVER = 3, 2
"""opentelemetry.proto.trace.v1.Span.SpanKind."""


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with collecting() as collector:
        yield collector


async def carried(world: World) -> None:
    """A tunnel that opens, echoes, and ends."""
    client, stream = await world.open()
    await world.echoes(client, stream)
    client.end()
    stream.end()
    assert await client.rest() == b""


async def until(gateway_metric: str, value: float, world: World, **labels: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await world.gateway.metric(gateway_metric, **labels) < value:
            pass


async def test_a_tunnel_is_a_span(collector: Collector, world: World) -> None:
    gateway = await world.start(environ=collector.environ)
    began = time.time()
    await carried(world)
    ended = time.time()
    line, span = await gateway.line(), await collector.span()
    assert line["traceparent"] == f"00-{span.trace}-{span.number}-01", "krun is told that it is recorded"
    assert (span.name, span.kind, span.parent) == (f"tunnel {GLOB}", CLIENT, "")
    assert began - 0.1 < span.start_s <= span.events["open"] <= span.end_s < ended + 0.1
    assert span.end_s - span.start_s == pytest.approx(line["duration"], abs=0.01)
    assert span.attributes == {
        "client.address": "127.0.0.1",
        "client.port": int(line["src.addr"].rpartition(":")[2]),
        "server.address": "hello.demo.svc.cluster.local",
        "tls.client.server_name": line["sni"],
        "network.peer.address": line["dst.addr"],
        "http.response.status_code": 200,
        "hbone.route": GLOB,
        "hbone.origin": line["origin"],
        "hbone.attempts": 1,
        "hbone.bytes_sent": line["bytes_sent"],
        "hbone.bytes_recv": line["bytes_recv"],
        "hbone.flags": "-",
    }
    assert not span.is_error
    assert (span.resource["service.name"], span.scope) == ("hgate", "hbone")


async def test_what_the_opening_waited_for_is_below_it(collector: Collector, world: World) -> None:
    route = tunnel(world.service.port, token={"audience": "https://a.example"}, tunnel="http://127.0.0.1/x")
    environ = collector.environ | {"GCE_METADATA_HOST": world.metadata.host}
    await world.start(route, environ=environ)
    await carried(world)
    spans = {span.name: span for span in await collector.spans(4)}
    whole = spans.pop(f"tunnel {GLOB}")
    assert set(spans) == {"connect", "token", "stream"}
    assert {span.parent for span in spans.values()} == {whole.number}
    assert {span.trace for span in spans.values()} == {whole.trace}
    times = [(spans[name].start_s, spans[name].end_s) for name in ("connect", "token", "stream")]
    assert sorted(times) == times
    assert whole.start_s <= times[0][0] + 0.005 and times[-1][1] <= whole.events["open"] + 0.005


async def test_a_refusal_is_a_failed_span(collector: Collector, world: World) -> None:
    await world.start(tunnel(closed_port()), environ=collector.environ)
    client = await world.client()
    await client.rest()
    span = await collector.span()
    assert span.is_error and "connection refused" in span.status_text
    assert (span.attributes["hbone.flags"], span.events) == ("CONNECT", {})
    other = await world.client(hello("nowhere.example"))
    await other.rest()
    span = await collector.span()
    assert (span.name, span.attributes["hbone.flags"]) == ("tunnel", "NO_ROUTE")
    assert span.attributes["server.address"] == "nowhere.example"


async def test_a_caller_s_trace_goes_on(tmp_path: Path, collector: Collector, target: TcpServer) -> None:
    """On the HBONE port: its tunnel is a child of the caller's span."""
    async with hbone_port.serving(tmp_path / "port", Rule((str(CALLER),), ("127.0.0.0/8:*",))) as port:
        settings = {
            "certificates": str(port.mesh.folder_of(hbone_port.GATEWAY)),
            "rules": [{"from": [str(CALLER)], "to": ["127.0.0.0/8:*"]}],
        }
        async with running(tmp_path / "far.yaml", [], hbone=settings, environ=collector.environ) as far:
            there = (await far.records.match(r"^hbone on 127\.0\.0\.1:(\d+)$"))[1]
            route = {
                "host": GLOB,
                "tunnel": f"https://127.0.0.1:{there}",
                "method": "CONNECT",
                "authority": f"127.0.0.1:{target.port}",
                "identity": str(port.mesh.member(CALLER)),
                "peer": [str(hbone_port.GATEWAY)],
            }
            async with running(tmp_path / "near.yaml", [route], environ=collector.environ) as near:
                client = await near.client(hello())
                served = await target.accept()
                client.end()
                served.end()
                await client.rest()
                spans: dict[int, Span] = {}
                while not spans.keys() >= {CLIENT, SERVER}:  # what the opening waited for comes, too
                    span = await collector.span()
                    spans[span.kind] = span
    own, theirs = spans[CLIENT], spans[SERVER]
    assert (theirs.trace, theirs.parent) == (own.trace, own.number)
    assert theirs.attributes["hbone.identity"] == str(CALLER)
    assert theirs.name == "tunnel hbone"


async def test_the_standard_variables_of_the_exporter_hold(collector: Collector, world: World) -> None:
    environ = collector.environ | {
        "OTEL_SERVICE_NAME": "edge",
        "OTEL_RESOURCE_ATTRIBUTES": "k8s.pod.name=hgate-1",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=blue",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
    }
    await world.start(environ=environ)
    await carried(world)
    span = await collector.span()
    assert (span.resource["service.name"], span.resource["k8s.pod.name"]) == ("edge", "hgate-1")
    assert collector.headers[0]["x-tenant"] == "blue"
    assert collector.headers[0]["content-encoding"] == "gzip"


async def test_none_is_sampled(collector: Collector, world: World) -> None:
    environ = collector.environ | {"OTEL_TRACES_SAMPLER": "parentbased_always_off"}
    gateway = await world.start(environ=environ)
    await carried(world)
    assert (await gateway.line())["traceparent"].endswith("-00")
    gateway.terminate()
    assert await gateway.exit_code() == EXIT_OK
    assert collector.is_empty and collector.requests == 0


async def test_the_last_spans_leave_before_the_end(collector: Collector, world: World) -> None:
    """A batch that nobody would have sent yet."""
    environ = collector.environ | {"OTEL_BSP_SCHEDULE_DELAY": "60000"}
    gateway = await world.start(environ=environ, drain_delay=0)
    for _ in range(3):
        await carried(world)
    gateway.terminate()
    assert await gateway.exit_code() == EXIT_OK
    spans = await collector.spans(4)
    assert [span.name for span in spans].count(f"tunnel {GLOB}") == 3
    assert collector.requests == 1


async def test_a_receiver_that_refuses(collector: Collector, world: World) -> None:
    collector.status = 403
    gateway = await world.start(environ=collector.environ)
    await carried(world)
    said = await gateway.records.match("^traces to http://127.0.0.1:")
    assert f"127.0.0.1:{collector.port}" in said.string and "403" in said.string
    await until("hbone_trace_spans_total", 1, world, result="failure")
    collector.status = 200
    await carried(world)
    await collector.span()
    await until("hbone_trace_spans_total", 1, world, result="success")


async def test_a_receiver_that_does_not_answer(collector: Collector, world: World) -> None:
    """Tunnels go on, and nothing is kept for it but the pipe."""
    collector.lets_wait.set()
    gateway = await world.start(environ=collector.environ | {"OTEL_EXPORTER_OTLP_TIMEOUT": "60"})
    await carried(world)
    async with asyncio.timeout(PATIENCE_S):
        await collector.asked.wait()
    for _ in range(50):
        await carried(world)
    assert await gateway.metric("hbone_tunnels_opened_total", route=GLOB) == 51
    collector.may_answer.set()
    gateway.terminate()
    assert await gateway.exit_code() == EXIT_OK


async def test_a_process_that_dies_is_replaced(
    collector: Collector, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "FIRST_DELAY_S", 0.01)
    gateway = await world.start(environ=collector.environ)
    await carried(world)
    assert {span.name for span in await collector.spans(2)} == {f"tunnel {GLOB}", "stream"}
    os.kill(_exporter(), signal.SIGKILL)
    await gateway.records.match("^traces: the exporting process ended with exit code -9; a new one ")
    await carried(world)
    assert (await collector.span()).name == f"tunnel {GLOB}"


async def test_a_variable_that_only_the_process_reads(collector: Collector, world: World) -> None:
    variable = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER"
    gateway = await world.start(environ=collector.environ | {variable: "nobody"})
    assert "nobody" in (await gateway.records.match("^traces to http://127.0.0.1:")).string
    await gateway.records.match("^traces: the exporting process ended with exit code 64; a new one ")
    await carried(world)


async def test_no_process_is_left(collector: Collector, world: World) -> None:
    gateway = await world.start(environ=collector.environ, drain_delay=0)
    await carried(world)
    await collector.span()
    process = _exporter()
    gateway.terminate()
    assert await gateway.exit_code() == EXIT_OK
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


async def test_several_workers_have_one(tmp_path: Path, collector: Collector, target: TcpServer) -> None:
    file = tmp_path / "hgate.yaml"
    write_config(file, [{"host": "**", "forward": f"127.0.0.1:{target.port}", "alpn": "any"}])
    async with hgate(file, "--workers", "2", environ={**os.environ, **collector.environ}) as running:
        for _ in range(4):
            async with TcpPeer.connected(running.port) as client:
                await client.send(hello("a.example"))
                served = await target.accept()
                served.end()
                await client.rest()
        spans = await collector.spans(4)
        assert {span.name for span in spans} == {"tunnel **"}
        async with asyncio.timeout(PATIENCE_S):
            while await running.metric("hbone_trace_spans_total", "success") < 4:
                pass
        assert await running.metric("hbone_trace_spans_dropped_total") == 0


def test_it_ends_though_others_make_the_pipe_wait(collector: Collector) -> None:
    """As the start of another one with the same pipe does."""
    pipe = SpanPipe.open()
    command = [sys.executable, "-m", exporting.MODULE]
    environ = {**os.environ, **collector.environ}
    with (
        closing(pipe),
        subprocess.Popen(command, stdin=pipe.read_end, stdout=subprocess.PIPE, env=environ) as process,
    ):
        assert process.stdout is not None
        os.write(pipe.write_end, b"no span\n")
        assert b"failed" in process.stdout.readline()
        os.set_blocking(pipe.read_end, True)
        process.stdout.close()
        try:
            assert process.wait(PATIENCE_S) == EXIT_OK
        finally:
            process.kill()


async def test_an_ops_process_that_dies_leaves_no_second_one(
    tmp_path: Path, collector: Collector, target: TcpServer
) -> None:
    file = tmp_path / "hgate.yaml"
    write_config(file, [{"host": "**", "forward": f"127.0.0.1:{target.port}", "alpn": "any"}])
    async with hgate(file, "--workers", "2", environ=collector.environ) as running:
        ops = int((await running.said(r"^ops process has pid (\d+)$"))[1])
        async with asyncio.timeout(PATIENCE_S):
            while not (exporters := await asyncio.to_thread(_exporters, ops)):
                pass
        os.kill(ops, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while set(exporters) & set(await asyncio.to_thread(_exporters)):
                pass
        async with TcpPeer.connected(running.port) as client:
            await client.send(hello("a.example"))
            (await target.accept()).end()
            await client.rest()
        assert (await collector.span()).name == "tunnel **"


@pytest.mark.parametrize("headers", ["authorization Bearer%20hunter2", "a=b,authorization: hunter2"])
async def test_no_header_is_in_the_log(collector: Collector, world: World, headers: str) -> None:
    """The SDK quotes those that it cannot read."""
    gateway = await world.start(environ=collector.environ | {"OTEL_EXPORTER_OTLP_HEADERS": headers})
    assert "Header format invalid" in (await gateway.records.match("^traces to ")).string
    await carried(world)
    await collector.span()
    assert [message for message in gateway.records.messages if "hunter2" in message] == []


def _exporter() -> int:
    """The process id of the one that exports for us."""
    for found in _exporters(os.getpid()):
        return found
    raise ProcessLookupError


def _exporters(of: int | None = None) -> list[int]:
    """All, or those that a process has started."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdecimal() else []
            if exporting.MODULE.encode() in command:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                found += [int(folder.name)] if of in (None, parent) else []
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found

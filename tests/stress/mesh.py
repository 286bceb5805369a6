"""What is under load, as processes, and the echo behind it.

clients → hgate → krun (h2c) → echo                        name `HELLO_NAME`
clients → hgate → hbone cloudrun (TLS) → krun → echo       name `CLOUDRUN_NAME`
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from shared.errors import EXIT_OK
from shared.net import http1
from tests.stress import figures
from tests.stress.gateway_file import GatewayFile, route, start_hgate
from tests.stress.programs import Program
from tests.support.hellos import hello
from tests.support.world import free_port

ADMIN_TIMEOUT_S = 10.0
MAX_DUMP_BYTES = 16 << 20
"""A dump of 10,000 tunnels has 3 MB."""

CONCURRENCY = 1 << 20
"""Requests at once that the stand-in gives krun: here it is to be no limit."""

DEMO = "demo.svc.cluster.local"
HELLO_NAME = f"outbound_.8080_._.hello.{DEMO}"
CLOUDRUN_NAME = f"outbound_.8080_._.cloudrun.{DEMO}"
DEAD_NAME = f"outbound_.8080_._.dead.{DEMO}"
"""Leads to a target of krun's that refuses connections."""
UNKNOWN_NAME = f"outbound_.8080_._.unknown.{DEMO}"
"""Leads to a target that krun does not know."""
NOBODY_NAME = f"outbound_.8080_._.nobody.{DEMO}"
"""No route matches it."""
ORIGIN_NAME = f"outbound_.8080_._.origin.{DEMO}"
"""Leads to an HTTP/2 server of the scenario's own."""

TOKEN_NAME = f"outbound_.8080_._.echo.{DEMO}"
"""Leads to krun's target of this name, with a token; any other service of `TOKEN_NAMES` to a 404."""
TOKEN_NAMES = f"outbound_.8080_._.random-{{}}.{DEMO}"

SERVICE_HOST = "cloudrun.a.run.app"

TARGETS = {HELLO_NAME: "echo", DEAD_NAME: "dead", UNKNOWN_NAME: "unknown"}
"""Which target of krun's a name leads to."""

HELLO = (Path(__file__).parent.parent / "shared/tls/hellos/envoy.bin").read_bytes()
"""Envoy's, recorded; it asks for `HELLO_NAME`."""


@dataclass(slots=True)
class Mesh:
    """What runs, made by `mesh`."""

    folder: Path
    gateway: GatewayFile
    echo: Program
    krun: Program
    hgate: Program
    cloudrun: Program | None
    krun_port: int
    cloudrun_port: int
    programs: list[Program]
    """All that were started; they are stopped in the end."""

    def start(self, program: Program) -> Program:
        """Remembers one more."""
        self.programs.append(program)
        return program

    async def metric(self, name: str) -> float:
        """The sum of a metric of hgate's over its labels."""
        text = (await self._get(self.gateway.metrics, "/metrics")).decode()
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == name)

    async def dump(self, path: str) -> list[dict[str, Any]]:
        """A dump of hgate's admin port."""
        dump: list[dict[str, Any]] = json.loads(await self._get(self.gateway.admin, path))
        return dump

    async def left(self) -> dict[str, float]:
        """What hgate still counts as open."""
        return {
            "connections": await self.metric("hbone_connections_open"),
            "tunnels": await self.metric("hbone_tunnels_open"),
            "streams": sum(connection["streams"] for connection in await self.dump("/connections")),
        }

    async def nothing_left(self, timeout_s: float) -> dict[str, float]:
        """The same, waiting up to `timeout_s` seconds for zeros."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            left = await self.left()
            if not any(left.values()) or loop.time() > deadline:
                return left
            await asyncio.sleep(figures.POLL_S)

    async def _get(self, port: int, path: str) -> bytes:
        url = f"http://127.0.0.1:{port}{path}"
        answer = await http1.get(url, headers={}, timeout_s=ADMIN_TIMEOUT_S, max_bytes=MAX_DUMP_BYTES)
        assert answer.status == 200, f"{url}: {answer.status}"
        return answer.body


@asynccontextmanager
async def mesh(
    folder: Path,
    *,
    cloudrun: bool = False,
    origin_port: int = 0,
    limits: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    metadata_host: str = "",
) -> AsyncIterator[Mesh]:
    """Runs echo, krun and hgate, and the stand-in if `cloudrun`, until the block ends.

    `limits` are hgate's, beside or instead of those of `GatewayFile`, `environ` is krun's. With
    `metadata_host` there is a route for `TOKEN_NAMES`, whose tokens are from there. AssertionError if one of
    them did not end in order or logged an error.
    """
    programs: list[Program] = []
    try:
        yield await _start(
            programs, folder, cloudrun, origin_port, limits or {}, environ or {}, metadata_host
        )
    finally:
        for program in reversed(programs):
            await program.stop()
    for program in programs:
        faults = program.faults()
        assert not faults, f"{program.name} logged {len(faults)} errors: {faults[0][:300]}"
        assert program.exit_code == EXIT_OK, f"{program.name} ended with exit code {program.exit_code}"


async def _start(
    programs: list[Program],
    folder: Path,
    cloudrun: bool,
    origin_port: int,
    limits: Mapping[str, Any],
    environ: Mapping[str, str],
    metadata_host: str,
) -> Mesh:
    """Starts them in order; `programs` are those that were, whatever goes wrong."""

    def started(program: Program) -> Program:
        programs.append(program)
        return program

    echo = started(Program("echo", ["tests.stress.echo"], folder))
    echo_port = await _port(echo, "echo on ")
    krun = started(Program("krun", ["agent"], folder, _krun_environ(echo_port, environ)))
    krun_port = await _port(krun, "tunnels on ")
    routes = [route(name, krun_port, target) for name, target in TARGETS.items()]
    if origin_port:
        routes.append(route(ORIGIN_NAME, origin_port, "echo"))
    front_end, front_end_port = None, 0
    if cloudrun:
        front_end = started(Program("cloudrun", _cloudrun_arguments(folder, krun_port), folder))
        front_end_port = await _port(front_end, "CLOUDRUN_ADDRESS=")
        routes.append(_through_cloudrun(folder, front_end_port))
    if metadata_host:
        routes.append(_with_tokens(krun_port))
    gateway = GatewayFile(folder / "hgate.yaml", routes, limits)
    hgate = started(start_hgate("hgate", gateway, folder, {"GCE_METADATA_HOST": metadata_host}))
    await hgate.said('"ready"')
    return Mesh(folder, gateway, echo, krun, hgate, front_end, krun_port, front_end_port, programs)


async def _port(program: Program, beginning: str) -> int:
    """The port of the loopback address that follows `beginning` in what the program says."""
    return int((await program.said(rf"{beginning}127\.0\.0\.1:(\d+)"))[1])


def hello_for(name: str) -> bytes:
    """A hello that asks for `name`."""
    return HELLO if name == HELLO_NAME else hello(name)


def ca(folder: Path) -> Path:
    """The certificate with which to trust the stand-in of the mesh in `folder`."""
    return folder / "cloudrun" / "ca.pem"


def _through_cloudrun(folder: Path, port: int) -> dict[str, Any]:
    tls = {"tunnel": f"https://{SERVICE_HOST}/_hbone/echo", "ca": str(ca(folder))}
    return route(CLOUDRUN_NAME, port, "echo") | tls


def _with_tokens(port: int) -> dict[str, Any]:
    """All services of the namespace, as at Cloud Run: whether one exists, only its answer tells."""
    return {
        "host": f"*.{DEMO}",
        "tunnel": "http://{service}.krun.example/_hbone/{service}",
        "connect": f"127.0.0.1:{port}",
        "token": {"audience": "https://{service}.krun.example"},
    }


def _krun_environ(echo_port: int, more: Mapping[str, str]) -> dict[str, str]:
    return {
        "XDS_ADDR": "-",
        "HBONE_LISTEN": "127.0.0.1:0",
        "HBONE_INBOUND": "none",
        "HBONE_APP": f"127.0.0.1:{echo_port}",
        "HBONE_LOG_FORMAT": "json",
        "HBONE_MAX_TUNNELS": "20000",  # more than any case opens
        "PORT_ECHO": f"127.0.0.1:{echo_port}",
        "PORT_DEAD": f"127.0.0.1:{free_port()}",
        **more,
    }


def _cloudrun_arguments(folder: Path, krun_port: int) -> list[str]:
    return [
        *("hbone", "cloudrun", "--log-format", "json", "--dir", str(folder / "cloudrun")),
        *("--listen", "127.0.0.1:0", "--metadata", "127.0.0.1:0", "--allow-unauthenticated"),
        *("--container", f"127.0.0.1:{krun_port}", "--audience", f"https://{SERVICE_HOST}"),
        *("--max-streams", "250", "--concurrency", str(CONCURRENCY)),
    ]

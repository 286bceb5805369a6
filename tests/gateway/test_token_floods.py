"""Clients without any credential that name one random service after the other: hgate, as a process, asks for
no token of an origin that does not stand, for few of those that do, and honest clients keep theirs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.config.limit_settings import Limits
from gateway.sni.new_audiences import MINUTE_S
from shared.credentials.certificates.authority import Authority
from shared.net.legs.stream import Stream, header_value
from shared.net.tls.certificate_folder import CERTIFICATES_FILE, PRIVATE_KEY_FILE
from shared.net.tls.contexts import server_context
from shared.tasks import spawn
from shared.trust.spiffe import SpiffeId
from tests.support.gateway_load import EchoService
from tests.support.gateway_world import tunnel
from tests.support.hellos import INTERNAL_ERROR, hello
from tests.support.hgate_process import Hgate, hgate
from tests.support.http2_peer import Service
from tests.support.metadata_server import MetadataServer, closed_port
from tests.support.running_gateway import write_config
from tests.support.tcp_peer import PATIENCE_S, TcpPeer
from tests.support.wall_clock import Mint

FLOOD = 1390
AT_ONCE = 40
HONEST = [f"honest-{number}" for number in range(20)]
AUDIENCE = "https://{service}.run.example"
HERE, THERE = "127.0.0.1", "127.0.0.2"


class Platform(EchoService):
    """Where all services are, as in Cloud Run: only the honest ones exist."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[str, set[str]] = {}

    def serve(self, stream: Stream) -> None:
        name = header_value(stream.headers, b":authority").decode().partition(".")[0]
        if name in HONEST:
            token = header_value(stream.headers, b"authorization").decode()
            self.tokens.setdefault(name, set()).add(token)
            super().serve(stream)
        else:
            stream.respond([(b":status", b"404")], end_stream=True)


def says(service: str) -> bytes:
    """The first bytes of a client of `service`."""
    return hello(f"outbound_.8080_._.{service}.demo.svc.cluster.local")


async def flood(port: int, services: Iterable[str]) -> Counter[bytes]:
    """A bare ClientHello to each of them; what the clients got."""
    got: Counter[bytes] = Counter()
    names = iter(services)

    async def client() -> None:
        for name in names:
            async with TcpPeer.connected(port) as peer:
                await peer.send(says(name))
                got[await peer.rest()] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(client())
    return got


async def is_served(port: int, service: str, source: str = HERE) -> bool:
    """Whether a client of `service` is carried."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
        said = says(service)
        writer.write(said)
        got = await reader.read(len(said))
        writer.close()
        return got == said


@asynccontextmanager
async def gateway(
    folder: Path, *routes: dict[str, Any], **limits: Any
) -> AsyncIterator[tuple[Hgate, MetadataServer]]:
    write_config(folder / "hgate.yaml", routes, **limits)
    async with (
        MetadataServer(Mint(time.time)) as metadata,
        hgate(folder / "hgate.yaml", environ={"GCE_METADATA_HOST": metadata.host}) as running,
    ):
        yield running, metadata


def asked(metadata: MetadataServer) -> Counter[str]:
    """For which services tokens were asked for, and how often."""
    return Counter(
        request.audience.removeprefix("https://").partition(".")[0] for request in metadata.requests
    )


async def test_random_services_at_a_platform_that_knows_every_name(tmp_path: Path) -> None:
    """Its names resolve and its certificate is good whatever the service."""
    async with (
        Platform.listening() as platform,
        gateway(tmp_path, tunnel(platform.port, token={"audience": AUDIENCE})) as (running, metadata),
    ):
        began = time.monotonic()
        for name in HONEST:
            assert await is_served(running.port, name)
        got = await flood(running.port, (f"random-{number}" for number in range(FLOOD)))
        assert sum(got.values()) == FLOOD
        assert b"" not in got, "each was told by an alert"
        requests = asked(metadata)
        most = Limits().max_new_audiences_per_source
        assert sum(requests.values()) <= most + most / MINUTE_S * (time.monotonic() - began)
        for name in HONEST:
            assert await is_served(running.port, name)
        assert {asked(metadata)[name] for name in HONEST} == {1}, "tokens that were good stay"
        assert {len(tokens) for tokens in platform.tokens.values()} == {1}
        assert not await is_served(running.port, "random-from-there", THERE)
        assert asked(metadata)["random-from-there"] == 1, "clients from elsewhere are not refused"
        limited = "max_new_audiences_per_source"
        refused = await running.metric("hbone_limit_refusals_total", limited)
        assert refused == len(HONEST) + FLOOD - sum(requests.values())
        line = next(line for line in running.lines if line["flags"] == "LIMIT")
        assert line["error"].startswith(
            f"no token is asked for https://{line['sni'].split('.')[3]}.run.example: "
        )
        assert limited in line["error"]


async def test_all_sources_together(tmp_path: Path) -> None:
    async with (
        Platform.listening() as platform,
        gateway(
            tmp_path, tunnel(platform.port, token={"audience": AUDIENCE}), max_new_audiences=len(HONEST) + 10
        ) as (running, metadata),
    ):
        for name in HONEST:
            assert await is_served(running.port, name)
        for number in range(60):
            await is_served(running.port, f"random-{number}", f"127.0.1.{number + 1}")
        refused = await running.metric("hbone_limit_refusals_total", "max_new_audiences")
        assert refused == len(HONEST) + 60 - len(metadata.requests)
        assert refused > 0
        for name in HONEST:
            assert await is_served(running.port, name, "127.0.2.1")
        assert {asked(metadata)[name] for name in HONEST} == {1}


@asynccontextmanager
async def refusing(folder: Path) -> AsyncIterator[int]:
    yield closed_port()


@asynccontextmanager
async def with_another_certificate(folder: Path) -> AsyncIterator[int]:
    """A server that takes every connection, and is somebody else by its certificate."""
    authority = Authority.create("services.example")
    authority.write(folder, authority.issue(SpiffeId("services.example", "/x"), dns_names=("other.example",)))
    context = server_context(folder / CERTIFICATES_FILE, folder / PRIVATE_KEY_FILE)
    async with Service.listening(context) as service:
        yield service.port


@asynccontextmanager
async def without_tls(folder: Path) -> AsyncIterator[int]:
    async with Service.listening() as service:
        yield service.port


@asynccontextmanager
async def silent(folder: Path) -> AsyncIterator[int]:
    """A listener that nobody accepts from: TCP stands, and TLS never."""
    import socket

    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("origin", [refusing, with_another_certificate, without_tls, silent])
async def test_an_origin_that_does_not_stand_costs_no_token(tmp_path: Path, origin: Any) -> None:
    async with AsyncExitStack() as block:
        port = await block.enter_async_context(origin(tmp_path))
        route = tunnel(port, tunnel="https://{service}.example/_hbone/15003", token={"audience": AUDIENCE})
        limits = {"connect_timeout": "500ms", "response_timeout": "1s"}
        running, metadata = await block.enter_async_context(gateway(tmp_path, route, **limits))
        got = await flood(running.port, (f"random-{number}" for number in range(100)))
        assert got == {INTERNAL_ERROR: 100}
        assert metadata.requests == []
        assert {line["flags"] for line in running.lines} <= {"CONNECT", "UPSTREAM"}


async def test_origins_that_hang_hold_no_token_work(tmp_path: Path) -> None:
    """Slow names and slow TLS: who waits for them waits by himself."""
    async with silent(tmp_path) as port, Platform.listening() as platform:
        slow = tunnel(
            port,
            host="slow-*.demo.svc.cluster.local",
            tunnel="https://{service}.example/_hbone/15003",
            token={"audience": AUDIENCE},
        )
        quick = tunnel(platform.port, token={"audience": AUDIENCE})
        async with gateway(tmp_path, slow, quick) as (running, metadata):
            names = (f"slow-{number}" for number in range(AT_ONCE))
            waiting = spawn(flood(running.port, names), name="flood")
            async with asyncio.timeout(PATIENCE_S):
                while sum((await running.samples("hbone_upstream_waiting")).values()) < AT_ONCE:
                    pass
            for name in HONEST:
                assert await is_served(running.port, name)
            assert not waiting.done()
            assert asked(metadata) == Counter(HONEST)
            waiting.cancel()

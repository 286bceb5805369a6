"""The admin, metrics and health ports: what is served where, who asked, and when a successor gets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from gateway.config.config import GatewayConfig
from gateway.ops import ops_ports
from gateway.ops.ops_ports import OpsPorts
from shared.address import Address
from shared.errors import UpstreamError
from shared.net import http1
from shared.net.listen_close import listening_on
from shared.ops.http_server import Handler, Response
from tests.support.tcp_peer import PATIENCE_S
from tests.support.world import free_port


def says(text: str) -> Handler:
    return lambda _: Response.text(200, text)


def named(name: str) -> OpsPorts:
    return OpsPorts(
        ready=says(f"ready of {name}"),
        live=says(f"live of {name}"),
        scrape=says(f"scrape of {name}"),
        admin={
            f"/{what}": says(f"{what} of {name}") for what in ("config", "tunnels", "connections", "tokens")
        },
    )


def config() -> GatewayConfig:
    health, metrics, admin = (Address("127.0.0.1", free_port()) for _ in range(3))
    return GatewayConfig(routes=(), health=health, metrics=metrics, admin=admin)


@asynccontextmanager
async def serving(name: str, where: GatewayConfig) -> AsyncIterator[OpsPorts]:
    ports = named(name)
    await ports.start(where)
    try:
        yield ports
    finally:
        await ports.close()


async def ask(address: Address | None, path: str) -> str:
    answer = await http1.get(f"http://{address}{path}", headers={}, timeout_s=PATIENCE_S, max_bytes=1 << 16)
    return answer.body.decode().strip() if answer.status == 200 else str(answer.status)


async def until_nobody_listens(address: Address | None, count: int = 0) -> None:
    assert address is not None
    async with asyncio.timeout(PATIENCE_S):
        while listening_on(address) > count:
            with suppress(UpstreamError):  # asked in the moment of its end
                await ask(address, "/")


async def test_each_port_has_its_own_paths() -> None:
    where = config()
    async with serving("a", where):
        assert await ask(where.health, "/healthz/ready") == "ready of a"
        assert await ask(where.health, "/healthz/live") == "live of a"
        assert await ask(where.metrics, "/metrics") == "scrape of a"
        assert await ask(where.metrics, "/stats/prometheus") == "scrape of a"
        for path in ("config", "tunnels", "connections", "tokens"):
            assert await ask(where.admin, f"/{path}") == f"{path} of a"
            assert await ask(where.health, f"/{path}") == await ask(where.metrics, f"/{path}") == "404"


async def test_who_has_asked_for_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    where = config()
    async with serving("a", where) as ports:
        assert not ports.readiness_is_asked_for
        await ask(where.health, "/healthz/live")
        assert not ports.readiness_is_asked_for
        await ask(where.health, "/healthz/ready")
        assert ports.readiness_is_asked_for
        monkeypatch.setattr(ops_ports, "RECENT_S", 0.0)
        assert not ports.readiness_is_asked_for, "not any more"


async def test_a_successor_gets_the_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_ports, "SUCCESSOR_LOOK_S", 0.001)
    where = config()
    async with serving("old", where) as old:
        old.leave_to_successor()
        assert await ask(where.health, "/healthz/ready") == "ready of old", "there is none yet"
        async with serving("new", where):
            for address in (where.health, where.metrics, where.admin):
                await until_nobody_listens(address, count=1)
            assert await ask(where.health, "/healthz/ready") == "ready of new"
            assert await ask(where.metrics, "/metrics") == "scrape of new"
            assert await ask(where.admin, "/config") == "config of new"


async def test_a_successor_that_has_one_port_gets_that() -> None:
    where = config()
    async with serving("old", where) as old:
        async with serving("new", GatewayConfig(routes=(), health=where.health, metrics=None, admin=None)):
            old.leave_to_successor()
            old.leave_to_successor()
            await until_nobody_listens(where.health, count=1)
            assert await ask(where.health, "/healthz/ready") == "ready of new"
        assert await ask(where.metrics, "/metrics") == "scrape of old"


# Floods, and web pages.


@asynccontextmanager
async def half_requests(address: Address | None, count: int) -> AsyncIterator[None]:
    """Clients that say one byte and wait."""
    assert address is not None
    writers = []
    for _ in range(count):
        _, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"G")
        writers.append(writer)
    try:
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


async def test_probes_are_answered_while_all_ports_are_crowded() -> None:
    where = config()
    async with (
        serving("a", where) as ports,
        half_requests(where.health, 130),
        half_requests(where.metrics, 130),
        half_requests(where.admin, 130),
    ):
        for _ in range(18):
            assert await ask(where.health, "/healthz/ready") == "ready of a"
            assert await ask(where.health, "/healthz/live") == "live of a"
        assert await ask(where.metrics, "/metrics") == "scrape of a"
        assert await ask(where.admin, "/tunnels") == "tunnels of a"
        told = {
            family.name: {sample.labels["port"]: sample.value for sample in family.samples}
            for family in ports.families()
        }
        evicted = told["hbone_ops_connections_evicted"]
        assert all(evicted[port] >= 130 - 64 for port in ("health", "metrics", "admin"))
        most, open_now = told["hbone_ops_connections_limit"], told["hbone_ops_connections_open"]
        assert all(0 < open_now[port] <= most[port] == 64 for port in most)


async def test_the_admin_port_shows_nothing_to_a_web_page() -> None:
    where = config()
    async with serving("a", where) as ports:
        for address, status in ((where.admin, 403), (where.metrics, 200), (where.health, 200)):
            path = {where.admin: "/tunnels", where.metrics: "/metrics", where.health: "/healthz/ready"}[
                address
            ]
            assert address is not None
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(f"GET {path} HTTP/1.1\r\nhost: rebound.example:{address.port}\r\n\r\n".encode())
            answer = await reader.readuntil(b"\r\n")
            assert answer == f"HTTP/1.1 {status} \r\n".encode()
            writer.transport.abort()
        refused = next(family for family in ports.families() if family.name == "hbone_ops_refusals")
        told = {(sample.labels["port"], sample.labels["reason"]): sample.value for sample in refused.samples}
        assert {key for key, value in told.items() if value} == {("admin", "host")}

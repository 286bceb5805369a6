"""What a SOCKS client can reach. Real clients and a real krun are in tests/path."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from hbone import arguments, destination
from hbone.destination import Destination
from hbone.forward import service as services
from hbone.forward import socks_port
from hbone.forward.connections import Connections
from hbone.forward.reports import Troubles
from hbone.forward.service import Service
from hbone.forward.socks_port import Reach, SocksPort, reply_to
from shared.address import Address
from shared.command_line import Parser
from shared.errors import (
    DialError,
    HboneError,
    NoRouteError,
    StatusError,
    TokenError,
    UnavailableError,
    UpstreamError,
)
from shared.net.socks import Reply
from tests.support.tcp_peer import TcpPeer

OWN = "https://hello.a.run.app"


class Mesh:
    """Looks names up as `destination.find` does, from a table."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.connects: list[str | None] = []

    async def find(self, text: str, options: argparse.Namespace, environ: Mapping[str, str]) -> Destination:
        self.asked.append(text)
        self.connects.append(options.connect)
        await asyncio.sleep(0)
        name = text.partition(":")[0].removesuffix(".svc.cluster.local")
        if name != "other.demo":
            raise UnavailableError(f"nobody knows {name}")
        return await destination.find("https://other.a.run.app/_hbone/1", options, environ)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh()


@pytest.fixture
async def reach(mesh: Mesh) -> Reach:
    parser = Parser("")
    arguments.add_destination(parser)
    options = parser.parse_args(["--no-token", "--connect", "127.0.0.1:1"])
    own = await destination.find(f"{OWN}/_hbone/22", options, {})
    pool = services.pool_of(0.0)

    def made(found: Destination) -> Service:
        return Service(found, pool, Troubles())

    return Reach(made(own), "hello.demo:80", options, {}, made, mesh.find)


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1", "::1", "hello.a.run.app", "hello.demo", "hello.demo.svc.cluster.local"],
)
async def test_the_own_service(reach: Reach, mesh: Mesh, host: str) -> None:
    assert str(await reach.way(Address(host, 8080))) == f"8080 of {OWN}"
    assert mesh.asked == []


async def test_another_service_is_looked_up_once(reach: Reach, mesh: Mesh) -> None:
    found = await asyncio.gather(*(reach.way(Address("other.demo", port)) for port in (80, 443)))
    assert [str(one) for one in found] == [f"{port} of https://other.a.run.app" for port in (80, 443)]
    assert mesh.asked == ["other.demo:80"]
    assert mesh.connects == [None]  # the address to connect to is that of the user's own service
    long = await reach.way(Address("other.demo.svc.cluster.local", 80))
    assert str(long) == "80 of https://other.a.run.app"


@pytest.mark.parametrize("host", ["www.example.com", "hello.evil.a.run.app", "evil-xyz.a.run.app"])
async def test_no_token_goes_to_whoever_has_a_name(reach: Reach, mesh: Mesh, host: str) -> None:
    with pytest.raises(NoRouteError, match="no name of a service"):
        await reach.way(Address(host, 443))
    assert mesh.asked == []


@pytest.mark.parametrize("host", ["10.0.0.1", "2001:db8::1", "169.254.169.254"])
async def test_addresses_are_no_services(reach: Reach, host: str) -> None:
    with pytest.raises(NoRouteError, match="an address is no service"):
        await reach.way(Address(host, 443))


async def test_a_name_that_nobody_knows_is_not_looked_up_again_at_once(
    reach: Reach, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = await asyncio.gather(
        *(reach.way(Address("no.body", port)) for port in (80, 81)), return_exceptions=True
    )
    assert [str(one) for one in both] == ["nobody knows no.body"] * 2
    with pytest.raises(UnavailableError):
        await reach.way(Address("no.body", 80))
    assert mesh.asked == ["no.body:80"]
    reach._unknown.clear()
    monkeypatch.setattr(socks_port, "NOT_FOUND_S", 0.0)
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await reach.way(Address("no.body", 80))
    assert len(mesh.asked) == 3


async def test_a_url_s_scheme_is_no_name(mesh: Mesh, reach: Reach) -> None:
    options = argparse.Namespace(connect=None, audience=None)
    by_url = Reach(reach._own, f"{OWN}/_hbone/22", options, {}, reach._service, mesh.find)
    with pytest.raises(UnavailableError, match="nobody knows https"):
        await by_url.way(Address("https", 80))


async def test_few_are_looked_up_at_once(reach: Reach, mesh: Mesh) -> None:
    now = most = 0

    async def counted(text: str, options: argparse.Namespace, environ: Mapping[str, str]) -> Destination:
        nonlocal now, most
        now += 1
        most = max(most, now)
        try:
            return await mesh.find(text, options, environ)
        finally:
            now -= 1

    reach._find = counted
    asking = [reach.way(Address(f"no.body{number}", 80)) for number in range(50)]
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(one) for one in found} == {UnavailableError}
    assert (len(mesh.asked), most) == (50, socks_port.MOST_LOOKUPS)


async def test_few_services_are_kept(reach: Reach, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socks_port, "MAX_SERVICES", 1)
    for _ in range(2):
        await reach.way(Address("other.demo", 80))
        await reach.way(Address("other.demo.svc.cluster.local", 80))
    assert len(mesh.asked) == 4


@pytest.mark.parametrize(
    ("error", "reply"),
    [
        (StatusError(404, "no such target"), Reply.REFUSED),
        (StatusError(503, "connection refused"), Reply.REFUSED),
        (StatusError(403, "no role"), Reply.NOT_ALLOWED),
        (StatusError(401, "no token"), Reply.NOT_ALLOWED),
        (TokenError("no source"), Reply.NOT_ALLOWED),
        (NoRouteError("no service"), Reply.NOT_ALLOWED),
        (DialError("no such name"), Reply.HOST_UNREACHABLE),
        (UnavailableError("nobody knows it"), Reply.HOST_UNREACHABLE),
        (UpstreamError("no answer"), Reply.FAILED),
        (HboneError("a fault"), Reply.FAILED),
    ],
)
def test_replies(error: HboneError, reply: Reply) -> None:
    assert reply_to(error) == reply


@pytest.fixture
async def port(reach: Reach) -> SocksPort:
    return SocksPort(Address("127.0.0.1", 0), Connections(Troubles()), reach)


async def opened(port: SocksPort) -> int:
    await port.open()
    assert isinstance(port.place, Address)
    return port.place.port


async def test_a_client_that_says_nothing(port: SocksPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socks_port, "NEGOTIATION_S", 0.05)
    async with TcpPeer.connected(await opened(port)) as client:
        assert await client.was_reset()
    port.close()
    assert len(port.connections) == 0


async def test_a_client_that_speaks_http(port: SocksPort) -> None:
    async with TcpPeer.connected(await opened(port)) as client:
        await client.send(b"GET / HTTP/1.1\r\n\r\n")
        assert await client.rest() == b""
    port.close()


async def test_a_client_is_told_in_order(port: SocksPort, tmp_path: Path) -> None:
    """Its answer is not lost to a reset; nobody listens where the own service should be."""
    async with TcpPeer.connected(await opened(port)) as client:
        await client.send(bytes((5, 1, 0)))
        assert await client.read(2) == bytes((5, 0))
        await client.send(bytes((5, 1, 0, 3, 9)) + b"localhost" + bytes((0, 80)) + b"and more")
        assert await client.rest() == bytes((5, Reply.HOST_UNREACHABLE, 0, 1)) + bytes(6)
    port.close()

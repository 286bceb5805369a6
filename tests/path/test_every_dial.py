"""Every dial of the product, in a network with a name server that is wrong: one way to look names up for all.

A name whose AAAA is never answered, and whose first address does not answer either, is reached all the same,
and in time; a name that nobody answers is given up without harm to others.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent.launch.startup import accepts
from shared.address import Address
from shared.errors import DialError, HboneError, UpstreamError
from shared.net import grpc, http1
from shared.net.dial import Origin, dial, dial_http2, dial_socket
from shared.net.http2.connection import Connection
from shared.net.names import happy_eyeballs
from shared.net.names.dns_query import OTHER_FAMILY_S
from shared.tasks import spawn
from tests.support.http2_peer import Http2Peer
from tests.support.name_server import NameServer, name_server, never, only
from tests.support.network import unanswering
from tests.support.network_namespace import POD, Network
from tests.support.process import started
from tests.support.tcp_peer import PATIENCE_S

NAME = "app.test"
DEAD = "app.dead.test"

SOON_S = 2.0
"""OTHER_FAMILY_S and a head start, with room for a busy machine; less than the 4 s of a look-up in vain."""

Dial = Callable[[str, int], Coroutine[Any, Any, object]]


@asynccontextmanager
async def names() -> AsyncIterator[NameServer]:
    async with name_server("127.0.0.53", 53) as server:
        server.names = {f"{NAME}.": (POD,)}
        server.faults = {"*.dead.test.": never, f"{NAME}.": only("AAAA", never)}
        yield server


@asynccontextmanager
async def app() -> AsyncIterator[tuple[int, list[str]]]:
    """Listens on POD and notes who comes."""
    come: list[str] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        come.append(writer.get_extra_info("peername")[0])
        writer.close()

    server = await asyncio.start_server(accept, POD, 0)
    try:
        yield server.sockets[0].getsockname()[1], come
    finally:
        server.close()


# Each way fails with a DialError that says what the resolver says.


async def by_leg(host: str, port: int) -> None:
    (await dial(Address(host, port), PATIENCE_S)).abort()


async def by_socket(host: str, port: int) -> None:
    (await dial_socket(Address(host, port), PATIENCE_S)).close()


async def by_origin(host: str, port: int) -> None:
    origin = Origin("http", host, Address(host, port))
    (await dial_http2(origin, PATIENCE_S, lambda: Connection(client=True))).abort("enough")


async def by_http1(host: str, port: int) -> None:
    url = f"http://{host}:{port}/"
    with pytest.raises(UpstreamError) as caught:  # the app says nothing
        await http1.get(url, headers={}, timeout_s=PATIENCE_S, max_bytes=1)
    if isinstance(caught.value, DialError):
        raise caught.value


async def by_grpc(host: str, port: int) -> None:
    with pytest.raises(HboneError) as caught:  # it speaks no TLS
        await grpc.call(
            Address(host, port),
            "/a/b",
            b"",
            tls=ssl.create_default_context(),
            server_name=host,
            metadata={},
            timeout_s=PATIENCE_S,
            max_bytes=1,
        )
    if "name server" in str(caught.value):
        raise caught.value


async def by_launcher(host: str, port: int) -> None:
    if not await accepts(Address(host, port)):
        raise DialError("name server")


DIALS = {
    "leg": by_leg,
    "socket": by_socket,
    "origin": by_origin,
    "http1": by_http1,
    "grpc": by_grpc,
    "launcher": by_launcher,
}


@pytest.mark.parametrize("way", DIALS.values(), ids=DIALS)
async def test_a_name_of_which_half_is_answered(network: Network, way: Dial) -> None:
    async with names() as server, app() as (port, come):
        started = asyncio.get_running_loop().time()
        await way(NAME, port)
        took_s = asyncio.get_running_loop().time() - started
        assert OTHER_FAMILY_S * 0.9 < took_s < SOON_S
        assert come == [POD]
        assert set(server.questions(f"{NAME}.")) == {"A", "AAAA"}


@pytest.mark.parametrize("way", DIALS.values(), ids=DIALS)
async def test_abandoned_look_ups_delay_nobody(network: Network, way: Dial) -> None:
    async with names() as server, app() as (port, _):
        dead = [spawn(way(f"{number}.dead.test", port), name="dead") for number in range(8)]
        await server.until(lambda: len({q.name for q in server.asked}) == 8)
        for task in dead:
            task.cancel()
        await asyncio.gather(*dead, return_exceptions=True)
        started = asyncio.get_running_loop().time()
        await way(NAME, port)
        assert asyncio.get_running_loop().time() - started < SOON_S


@pytest.mark.parametrize("way", DIALS.values(), ids=DIALS)
async def test_addresses_are_raced(network: Network, way: Dial) -> None:
    with unanswering() as port:
        async with names() as server:
            server.names = {"two.test.": ("127.0.0.1", POD)}
            listener = await asyncio.start_server(lambda _, writer: writer.close(), POD, port)
            try:
                started = asyncio.get_running_loop().time()
                await way("two.test", port)
                assert asyncio.get_running_loop().time() - started < happy_eyeballs.HEAD_START_S + SOON_S
            finally:
                listener.close()


@pytest.mark.parametrize("way", [*DIALS.values()][:4], ids=[*DIALS][:4])
async def test_a_dead_name_s_error_names_the_name_server(network: Network, way: Dial) -> None:
    async with names():
        with pytest.raises(DialError, match=r"no answer from the name server 127\.0\.0\.53 within 4 s"):
            await way(DEAD, 80)


# The search list.

SEARCH = "nameserver 127.0.0.53\nsearch demo.svc.cluster.local svc.cluster.local\noptions ndots:1\n"


@pytest.mark.parametrize(
    "way", [way for name, way in DIALS.items() if name != "origin"], ids=[n for n in DIALS if n != "origin"]
)
async def test_names_in_settings_follow_the_search_list(network: Network, way: Dial) -> None:
    network.resolv_conf.write_text(SEARCH)
    async with names() as server, app() as (port, come):
        server.names = {"app.prod.svc.cluster.local.": (POD,)}
        await way("app.prod", port)
        assert come == [POD]


async def test_the_name_in_a_url_does_not_but_a_place_to_dial_does(network: Network) -> None:
    network.resolv_conf.write_text(SEARCH)
    async with names() as server, app() as (port, come):
        server.names = {"app.prod.svc.cluster.local.": (POD,)}
        with pytest.raises(DialError, match="NXDOMAIN"):
            await by_origin("app.prod", port)
        origin = Origin("http", "x", Address("app.prod", port), searched=True)
        (await dial_http2(origin, PATIENCE_S, lambda: Connection(client=True))).abort("enough")
        assert come == [POD]


# krun as a process.


async def test_krun_s_targets(network: Network) -> None:
    network.resolv_conf.write_text(SEARCH)
    async with names() as server, app() as (port, come):
        server.names = {"db.prod.svc.cluster.local.": (POD,)}
        environ = {
            "XDS_ADDR": "-",
            "HBONE_INBOUND": "none",
            "HBONE_STARTUP_PROBE": "-",
            "HBONE_LISTEN": "127.0.0.1:0",
            "HBONE_DIAL_TIMEOUT": "20",
            "PORT_DB": f"db.prod:{port}",
            **{f"PORT_DEAD{number}": f"{number}.dead.test:1" for number in range(8)},
        }
        async with started("agent", environ=environ) as krun:
            listening = int((await krun.said(r"tunnels on 127\.0\.0\.1:(\d+)"))[1])
            async with Http2Peer.connected(listening) as impatient:
                for number in range(8):
                    impatient.request(b"POST", f"/_hbone/DEAD{number}".encode())
                await server.until(lambda: len([n for n in server.asked_names if ".dead." in n]) == 8)
            async with Http2Peer.connected(listening) as peer:
                begun = asyncio.get_running_loop().time()
                assert await peer.request(b"POST", b"/_hbone/DB").status() == 200
                assert asyncio.get_running_loop().time() - begun < SOON_S
        assert come == [POD]

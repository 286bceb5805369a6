"""Replacing hgate, and the end of krun, under clients that ask for each tunnel exactly once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.errors import EXIT_OK
from tests.path.app import App, lasting
from tests.support.distance import distance
from tests.support.hbone_port import CALLER, GATEWAY, Mesh
from tests.support.hgate_process import Hgate, hgate
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.metadata_server import closed_port
from tests.support.openers import Openers, opening
from tests.support.process import Process, started
from tests.support.running_gateway import write_config
from tests.support.tcp_peer import PATIENCE_S

OPENERS = 20
FAR_S = 0.02
DELAYS_S = (0.0, FAR_S)
"""Of the path, one way: on this machine, and between two regions."""


@pytest.fixture
def echo(app: App) -> int:
    """A port that gives back what it is sent."""
    app.behave = lasting(b"")
    return app.address.port


# hgate.


@asynccontextmanager
async def hbone_clients(mesh: Mesh, port: int, echo: int, delay_s: float) -> AsyncIterator[Openers]:
    """Members of the mesh that open tunnels to `echo` at an HBONE port."""
    tls = mesh.tls(mesh.member(CALLER))

    def request(peer: Http2Peer) -> PeerStream:
        return peer.request(b"CONNECT", b"", authority=b"127.0.0.1:%d" % echo)

    async with (
        distance(port, delay_s) as near,
        opening(OPENERS, lambda: Http2Peer.connected(near, tls), request) as openers,
    ):
        yield openers


def configure(folder: Path, mesh: Mesh, port: int) -> Path:
    """hgate's file: an HBONE port that lets the caller to loopback."""
    rule = {"from": [str(CALLER)], "to": ["127.0.0.0/8:*"]}
    file = folder / "hgate.yaml"
    listen, own = [f"127.0.0.1:{port}"], str(mesh.member(GATEWAY))
    write_config(file, [], {"listen": listen, "certificates": own, "rules": [rule]}, drain_delay=0)
    return file


async def ends_in_order(old: Hgate) -> None:
    """SIGTERM, and the end."""
    old.process.send(signal.SIGTERM)
    assert await old.ended() == EXIT_OK


@pytest.mark.parametrize(
    ("delay_s", "flags"), [*((delay_s, ()) for delay_s in DELAYS_S), (FAR_S, ("--workers", "2"))]
)
async def test_replacing_hgate_breaks_no_request(
    tmp_path: Path, echo: int, delay_s: float, flags: tuple[str, ...]
) -> None:
    mesh, port = Mesh(tmp_path / "mesh"), closed_port()
    file = configure(tmp_path, mesh, port)
    async with hgate(file, *flags) as old, hbone_clients(mesh, port, echo, delay_s) as openers:
        await openers.until_served(OPENERS)
        async with hgate(file, *flags):
            await ends_in_order(old)
            await openers.until_served(OPENERS)
            await openers.stop()
    assert openers.broken == []
    assert openers.connections >= 2, "one to each, or more to the one that ends"
    assert {line["flags"] for line in old.lines} == {"-"}


# krun.


@asynccontextmanager
async def krun(echo: int) -> AsyncIterator[tuple[Process, int]]:
    """krun as a sidecar with `echo` as the target /_hbone/echo, and its port."""
    port = closed_port()
    settings = {
        "HBONE_LISTEN": f"127.0.0.1:{port}",
        "HBONE_INBOUND": "none",
        "HBONE_STARTUP_PROBE": "-",
        "HBONE_APP": f"127.0.0.1:{closed_port()}",
        "HBONE_LOG_FORMAT": "json",
        "PORT_echo": f"127.0.0.1:{echo}",
    }
    async with started("agent", environ=settings) as process:
        await process.said(f"^tunnels on 127.0.0.1:{port}$")
        yield process, port


@pytest.mark.parametrize("delay_s", DELAYS_S)
async def test_the_end_of_krun_breaks_no_request(echo: int, delay_s: float) -> None:
    """As on Cloud Run, whose front end sends a container that ends no new requests, once it knows."""

    def request(peer: Http2Peer) -> PeerStream:
        return peer.request(b"POST", b"/_hbone/echo")

    async with (
        krun(echo) as (process, port),
        distance(port, delay_s) as near,
        opening(OPENERS, lambda: Http2Peer.connected(near), request, may_connect=False) as openers,
    ):
        await openers.until_served(OPENERS)
        process.send(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            code, _, err = await process.ended()
        await openers.stop()
    assert openers.broken == []
    assert code == EXIT_OK
    assert "are reset" not in err

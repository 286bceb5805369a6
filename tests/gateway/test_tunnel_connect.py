"""hgate as a client of HBONE: its tunnels go through the HBONE port of another, which it proves itself to.

The client is a socket that says hello, the port is ours, and at its other end is a plain TCP server.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.rules.hbone_rules import Rule
from shared.net.tls import mesh_tls
from shared.trust.spiffe import SpiffeId
from tests.support import hbone_port
from tests.support.gateway_world import GLOB, World
from tests.support.hbone_port import CALLER, GATEWAY, TRUST_DOMAIN, HbonePort
from tests.support.hellos import ACCESS_DENIED, INTERNAL_ERROR, hello
from tests.support.http2_peer import Service
from tests.support.metadata_server import closed_port
from tests.support.revocation import put, revocation_list, serial_in
from tests.support.tcp_peer import TcpServer

STRANGER = SpiffeId.of_workload(TRUST_DOMAIN, "other", "stranger")
BIG = os.urandom(3 << 20)
RULE = Rule((str(CALLER),), ("127.0.0.0/8:*",))


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[HbonePort]:
    async with hbone_port.serving(tmp_path / "mesh", RULE) as port:
        yield port


def route(port: HbonePort, target: int, who: SpiffeId = CALLER, **fields: Any) -> dict[str, Any]:
    """A route through `port` to a loopback port."""
    return {
        "host": GLOB,
        "tunnel": f"https://127.0.0.1:{port.port}",
        "method": "CONNECT",
        "authority": f"127.0.0.1:{target}",
        "identity": str(port.mesh.member(who)),
        "peer": [str(GATEWAY)],
    } | fields


async def test_a_tunnel_through_both(world: World, port: HbonePort, target: TcpServer) -> None:
    gateway = await world.start(route(port, target.port))
    said = hello()
    client = await world.client(said)
    there = await target.accept()
    assert await there.read(len(said)) == said
    client.send_soon(BIG)
    client.end()
    assert await there.rest() == BIG
    await there.send(BIG)
    there.end()
    assert await client.rest() == BIG
    near, far = await gateway.line(), await port.line()
    assert near["origin"] == f"https://127.0.0.1:{port.port}"
    assert near["tunnel.target"] == far["tunnel.target"] == f"127.0.0.1:{target.port}"
    assert near["traceparent"] == far["traceparent"], "both lines are found by it"
    assert far["forwarded.for"] == client.address
    assert (near["status"], far["status"]) == (200, 200)
    assert far["identity"] == str(CALLER)
    assert near["bytes_recv"] == far["bytes_recv"] == len(BIG)
    assert near["bytes_sent"] == far["bytes_sent"] == len(said) + len(BIG)
    assert world.metadata.requests == [], "no token for whom certificates are enough"


async def test_tunnels_share_a_connection(world: World, port: HbonePort, target: TcpServer) -> None:
    """Envoy opened one for each CONNECT once (envoy#25504)."""
    await world.start(route(port, target.port))
    said = [hello() for _ in range(10)]
    for one in said:
        await world.client(one)
    there = [await target.accept() for _ in said]
    assert {await peer.read(len(said[0])) for peer in there} == set(said)
    assert (port.listener.open_connections, port.listener.open_tunnels) == (1, 10)


async def test_identities_share_none(world: World, port: HbonePort, target: TcpServer) -> None:
    """Nobody's tunnel goes over a connection that another has proved itself on."""
    await world.start(
        route(port, target.port, host="hello.demo.svc.cluster.local"),
        route(port, target.port, STRANGER, host="other.demo.svc.cluster.local"),
    )
    await world.client()
    await target.accept()
    other = await world.client(hello("outbound_.80_._.other.demo.svc.cluster.local"))
    assert await other.rest() == ACCESS_DENIED
    assert (await port.line())["identity"] == str(STRANGER)
    await port.until(2)


async def test_a_refusal_of_the_rules(world: World, port: HbonePort, target: TcpServer) -> None:
    gateway = await world.start(route(port, target.port, STRANGER))
    client = await world.client()
    assert await client.rest() == ACCESS_DENIED
    line = await gateway.line()
    assert (line["status"], line["flags"]) == (401, "STATUS")
    assert line["error"].startswith(f"answered 401: peer {STRANGER} denied 127.0.0.1:{target.port}: no rule")
    assert target.count == 0


@pytest.mark.parametrize("status", [401, 403])
async def test_a_peer_s_policy_is_not_our_token(world: World, port: HbonePort, status: int) -> None:
    """As ztunnel has it: a bare 401, and no token was sent."""
    folder, here = port.mesh.member(CALLER), port.mesh.member(GATEWAY)
    async with Service.listening(mesh_tls.server_context(here, tls12=False)) as ztunnel:
        there = f"https://127.0.0.1:{ztunnel.port}"
        gateway = await world.start(route(port, 80, tunnel=there, identity=str(folder)))
        client = await world.client()
        (await ztunnel.request()).respond(status, end=True)
        assert await client.rest() == ACCESS_DENIED
        line = await gateway.line()
        assert line["error"] == (
            f"answered {status}: the peer's own policy does not allow us (no token was sent): "
            "do its rules name our identity and this target?"
        )
        assert "attempts" not in line
        assert (ztunnel.asked, world.metadata.requests) == (False, [])


async def test_a_server_that_is_somebody_else(world: World, port: HbonePort, target: TcpServer) -> None:
    gateway = await world.start(route(port, target.port, peer=[str(STRANGER)]))
    client = await world.client()
    assert await client.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert line["flags"] == "CONNECT"
    assert line["error"].endswith(f"peer {GATEWAY} denied: no rule allows it")
    assert target.count == 0


async def test_certificates_that_are_not_there(world: World, port: HbonePort, target: TcpServer) -> None:
    gateway = await world.start(route(port, target.port, identity="/nonexistent"))
    client = await world.client()
    assert await client.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert line["flags"] == "CONNECT"
    assert "our own certificates: /nonexistent/certificates.pem: No such file" in line["error"]


async def test_a_target_that_is_not_there(world: World, port: HbonePort) -> None:
    gateway = await world.start(route(port, closed_port()), max_retries=0)
    client = await world.client()
    assert await client.rest() == INTERNAL_ERROR
    assert "answered 503: connect to 127.0.0.1:" in (await gateway.line())["error"]


async def test_a_server_that_is_revoked(
    world: World, port: HbonePort, target: TcpServer, tmp_path: Path
) -> None:
    """First while its tunnel is open, by the gateway's own look at the file; then it is not had again."""
    crl = tmp_path / "crl.pem"
    put(crl, revocation_list(port.mesh.authority))
    gateway = await world.start(route(port, target.port, crl=str(crl)))
    client = await world.client()
    there = await target.accept()
    assert await gateway.metric("hbone_crl_next_update_timestamp_seconds", place="routes") > time.time()
    put(crl, revocation_list(port.mesh.authority, serial_in(port.mesh.folder_of(GATEWAY))))
    with pytest.raises(ConnectionResetError):
        await client.rest()
    line = await gateway.line()
    assert (line["flags"], line["status"]) == ("DENY", 200)
    assert "it is revoked: serial number" in line["error"]
    with pytest.raises(ConnectionResetError):
        await there.rest()
    assert await gateway.metric("hbone_crl_connections_ended_total", place="routes") == 1
    again = await world.client()
    assert await again.rest() == INTERNAL_ERROR
    line = await gateway.line()
    assert line["flags"] == "CONNECT" and "it is revoked: serial number" in line["error"]
    assert await gateway.metric("istio_crl_policy_rejections_total", reporter="source") >= 1

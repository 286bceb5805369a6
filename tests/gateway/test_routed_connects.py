"""CONNECTs of the HBONE port that a route with `inner` takes: a member of the mesh, played by the h2 library
with ztunnel's settings, the gateway as a whole, and a service that is asked for tunnels with POST."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from h2.settings import SettingCodes

from gateway.config import cluster_files, followed_list
from gateway.hbone.hbone_tunnel import HboneTunnels
from gateway.rules.routes import RouteTable, Target
from shared.errors import OverloadError
from shared.http2.frames import CANCEL, CONNECT_ERROR, NO_ERROR
from shared.tasks import spawn
from shared.trust.jwt_check import GOOGLE_ISSUER, Issuer
from tests.support.close_model import FIN, RST, StreamEnd
from tests.support.gateway_world import World
from tests.support.hbone_port import CALLER, GATEWAY, TRUST_DOMAIN, Mesh
from tests.support.hellos import UNRECOGNIZED_NAME, hello
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.key_server import served
from tests.support.metadata_server import closed_port
from tests.support.running_gateway import RunningGateway, change_config, write_config
from tests.support.tcp_peer import PATIENCE_S, TcpServer

GLOB = "*.prod.svc.cluster.local"
ROUTE = f"hbone {GLOB}"
"""Its name in metrics and logs."""

NAME = "db.prod.svc.cluster.local"
AUTHORITY = f"{NAME}:5432"
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
FIRST = b"\x16\x03\x01 the first flight of the inner TLS"
BIG = os.urandom(3 << 20)
WITHOUT_DNS = {"from": ["*"], "to": ["*.prod.svc.cluster.local:5432"]}

ZTUNNEL: dict[SettingCodes | int, int] = {
    SettingCodes.ENABLE_PUSH: 0,
    SettingCodes.INITIAL_WINDOW_SIZE: 4 << 20,
    SettingCodes.MAX_FRAME_SIZE: 1 << 20,
    SettingCodes.MAX_HEADER_LIST_SIZE: 16 << 10,
}
"""What ztunnel says in its SETTINGS."""


class Ambient:
    """The gateway with an HBONE port, and the way to it."""

    def __init__(self, world: World, mesh: Mesh, block: AsyncExitStack) -> None:
        self.world = world
        self.mesh = mesh
        self._block = block

    def route(self, **fields: Any) -> dict[str, Any]:
        """A route for CONNECTs to the service."""
        return {
            "host": GLOB,
            "tunnel": "http://{service}.example/_hbone/15008",
            "connect": f"127.0.0.1:{self.world.service.port}",
            "token": "none",
            "inner": "hbone",
        } | fields

    def hbone(self, *rules: dict[str, Any], **fields: Any) -> dict[str, Any]:
        return {"certificates": str(self.mesh.member(GATEWAY)), "rules": rules or [WITHOUT_DNS]} | fields

    async def start(
        self, *routes: dict[str, Any], rules: tuple[dict[str, Any], ...] = (), **limits: Any
    ) -> RunningGateway:
        """Starts the gateway; without routes, `route` alone."""
        return await self.world.start(*routes or (self.route(),), hbone=self.hbone(*rules), **limits)

    async def member(self) -> Http2Peer:
        """A ztunnel's connection."""
        match = await self.world.gateway.records.match(r"hbone on 127\.0\.0\.1:(\d+)")
        tls = self.mesh.tls(self.mesh.member(CALLER))
        peer = await self._block.enter_async_context(Http2Peer.connected(int(match[1]), tls))
        peer.act(lambda h2: h2.update_settings(ZTUNNEL))
        return peer

    async def open(self, peer: Http2Peer) -> tuple[PeerStream, PeerStream]:
        """Both ends of an open tunnel."""
        near = ask(peer)
        far = await self.world.service.request()
        far.respond(200)
        assert await near.status() == 200
        return near, far


@pytest.fixture
async def ambient(world: World, tmp_path: Path) -> AsyncIterator[Ambient]:
    async with AsyncExitStack() as block:
        yield Ambient(world, Mesh(tmp_path), block)


@pytest.fixture
def no_dns(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise AssertionError("a name was looked up")

    monkeypatch.setattr("gateway.hbone.hbone_tunnel.resolve", refuse)


def ask(peer: Http2Peer, authority: str = AUTHORITY, **fields: str) -> PeerStream:
    """Asks as ztunnel does."""
    told = {
        "baggage": "k8s.cluster.name=near,k8s.namespace.name=demo,service.name=client",
        "forwarded": f'for="10.1.2.3:44312";host={NAME}',
        "traceparent": TRACE,
    } | fields
    more = [(name.encode(), value.encode()) for name, value in told.items()]
    return peer.request(b"CONNECT", b"", more, authority=authority.encode())


async def body_of(stream: PeerStream) -> str:
    return (await stream.rest()).decode().strip()


async def echoes(near: PeerStream, far: PeerStream) -> None:
    """Holds that a tunnel carries bytes both ways."""
    await near.send(b"there")
    assert await far.read(5) == b"there"
    await far.send(b"and back")
    assert await near.read(8) == b"and back"


async def ends(near: PeerStream, far: PeerStream) -> None:
    """Ends a tunnel in good order."""
    near.end()
    assert await far.rest() == b""
    far.end()
    assert await near.rest() == b""


# A tunnel.


async def test_a_tunnel_from_request_to_line(ambient: Ambient, no_dns: None) -> None:
    gateway = await ambient.start()
    near = ask(await ambient.member())
    far = await ambient.world.service.request()
    assert (far[b":method"], far[b":path"], far[b":authority"]) == (b"POST", b"/_hbone/15008", b"db.example")
    assert far[b"traceparent"] == TRACE.encode(), "the lines of all ends are found by it"
    assert not near.fields, "no answer before the service's"
    far.respond(200)
    assert await near.status() == 200
    assert near.fields == [(b":status", b"200")]
    await echoes(near, far)
    assert await gateway.metric("hbone_tunnels_open", route=ROUTE) == 1
    assert await gateway.metric("hbone_route_connections", route=ROUTE) == 1
    assert await gateway.metric("hbone_listener_tunnels_open") == 1
    [row] = await gateway.dump("/tunnels")
    assert (row["route"], row["tunnel.target"], row["bytes_sent"]) == (ROUTE, AUTHORITY, 5)
    await ends(near, far)
    line = await gateway.line()
    assert {key: line[key] for key in line if key not in ("timestamp", "setup", "duration")} == {
        "severity": "INFO",
        "message": "connection complete",
        "logger": "hbone.access",
        "component": "hgate",
        "src.addr": line["src.addr"],
        "route": ROUTE,
        "origin": "http://db.example/_hbone/15008",
        "dst.addr": f"127.0.0.1:{ambient.world.service.port}",
        "tunnel.target": AUTHORITY,
        "stream": near.number,
        "status": 200,
        "identity": str(CALLER),
        "forwarded.for": "10.1.2.3:44312",
        "traceparent": TRACE,
        "bytes_sent": 5,
        "bytes_recv": 8,
        "flags": "-",
    }
    assert await gateway.metric("hbone_sent_bytes_total", route=ROUTE) == 5
    assert await gateway.metric("hbone_tunnels_closed_total", route=ROUTE, flags="-") == 1
    assert await gateway.metric("hbone_route_connections", route=ROUTE) == 0
    assert await gateway.dump("/tunnels") == []


async def test_no_more_of_a_trace_goes_on_than_is_known(ambient: Ambient) -> None:
    await ambient.start()
    ask(await ambient.member(), traceparent=f"cc{TRACE[2:]}-{'x' * 5000}")
    far = await ambient.world.service.request()
    assert far[b"traceparent"].decode() == f"cc{TRACE[2:]}"


async def test_a_fault_of_ours_costs_one_tunnel(ambient: Ambient, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = await ambient.start()
    peer = await ambient.member()
    witness = await ambient.open(peer)

    def broken(*_: object) -> Target:
        raise RuntimeError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(RouteTable, "find_connect", broken)
        near = ask(peer)
        assert await near.status() == 503
    assert (await gateway.line())["flags"] == "INTERNAL"
    await gateway.records.match("hbone tunnel to .* failed: RuntimeError: a fault")
    await echoes(*witness)


async def test_a_trace_of_ours_where_the_member_has_none(ambient: Ambient) -> None:
    gateway = await ambient.start()
    near = ask(await ambient.member(), traceparent="none")
    far = await ambient.world.service.request()
    far.respond(200)
    await near.status()
    await ends(near, far)
    assert (await gateway.line())["traceparent"] == far[b"traceparent"].decode()


@pytest.mark.parametrize("authority", [f"{NAME}:5432", f"{NAME}.:5432", "DB.Prod.svc.Cluster.local:5432"])
async def test_ways_to_write_a_name(ambient: Ambient, no_dns: None, authority: str) -> None:
    await ambient.start(ambient.route(tunnel="http://{service}.{namespace}.example/{port}/{host}"))
    ask(await ambient.member(), authority)
    far = await ambient.world.service.request()
    assert (far[b":authority"], far[b":path"]) == (b"db.prod.example", f"/5432/{NAME}".encode())


async def test_the_route_s_token_goes_along(ambient: Ambient) -> None:
    route = ambient.route(tunnel="http://127.0.0.1/_hbone/15008", token={"audience": "https://db.example"})
    await ambient.start(route)
    near = ask(await ambient.member())
    far = await ambient.world.service.request()
    assert far[b"authorization"].startswith(b"Bearer ")
    far.respond(200)
    await near.status()
    await echoes(near, far)


async def test_tunnels_share_a_connection_with_those_of_clients_by_sni(ambient: Ambient) -> None:
    """A service has a route for each kind of client, with the same host."""
    by_sni = ambient.route(tunnel="http://{service}.example/_hbone/15003")
    del by_sni["inner"]
    gateway = await ambient.start(ambient.route(), by_sni)
    near, far = await ambient.open(await ambient.member())
    client = await ambient.world.client(hello(f"outbound_.5432_._.{NAME}"))
    other = await ambient.world.service.request()
    assert (far[b":path"], other[b":path"]) == (b"/_hbone/15008", b"/_hbone/15003")
    assert far.peer is other.peer
    other.respond(200)
    await echoes(near, far)
    await ends(near, far)
    client.end()
    other.end()
    assert {(await gateway.line())["route"] for _ in range(2)} == {GLOB, ROUTE}


async def test_the_client_s_own_mtls(ambient: Ambient, no_dns: None) -> None:
    """inner: tls takes both kinds of client."""
    gateway = await ambient.start(ambient.route(inner="tls", tunnel="http://{service}.example/_hbone/15003"))
    near, far = await ambient.open(await ambient.member())
    assert far[b":path"] == b"/_hbone/15003"
    await echoes(near, far)
    await ends(near, far)
    client = await ambient.world.client(hello(f"outbound_.5432_._.{NAME}"))
    far = await ambient.world.service.request()
    far.respond(200)
    assert await far.read(5) == hello()[:5]
    client.end()
    far.end()
    assert {(await gateway.line())["route"] for _ in range(2)} == {GLOB}


# The first flight, and attempts.


async def test_the_first_flight_goes_with_the_request(ambient: Ambient) -> None:
    gateway = await ambient.start()
    peer = await ambient.member()
    near = ask(peer)
    await near.send(FIRST)
    far = await ambient.world.service.request()
    await near.send(b", and more")
    far.respond(200)
    assert await near.status() == 200
    assert await far.read(len(FIRST) + 10) == FIRST + b", and more"
    await ends(near, far)
    assert (await gateway.line())["bytes_sent"] == len(FIRST) + 10


async def test_a_request_that_is_sent_again(ambient: Ambient) -> None:
    gateway = await ambient.start()
    near = ask(await ambient.member())
    await near.send(FIRST)
    (await ambient.world.service.request()).respond(503, end=True)
    far = await ambient.world.service.request()
    far.respond(200)
    assert await near.status() == 200
    assert await far.read(len(FIRST)) == FIRST
    await ends(near, far)
    line = await gateway.line()
    assert (line["attempts"], line["bytes_sent"]) == (2, len(FIRST))
    assert await gateway.metric("hbone_upstream_retries_total", route=ROUTE, reason="503") == 1


async def test_a_service_that_scales_to_zero(ambient: Ambient) -> None:
    """Its route waits for it, for CONNECTs as for clients by SNI."""
    gateway = await ambient.start(ambient.route(cold_start="60s"), max_retries=0, response_timeout="100ms")
    near = ask(await ambient.member())
    (await ambient.world.service.request()).respond(503, end=True)
    far = await ambient.world.service.request()
    assert await gateway.metric("hbone_tunnels_opening", route=ROUTE) == 1
    assert await gateway.metric("hbone_tunnels_starting", route=ROUTE) == 1
    far.respond(200)
    assert await near.status() == 200
    await echoes(near, far)
    for name in ("hbone_tunnels_opening", "hbone_tunnels_starting"):
        assert await gateway.metric(name, route=ROUTE) == 0
    await ends(near, far)
    assert (await gateway.line())["attempts"] == 2


# Refusals.


@pytest.mark.parametrize(
    ("authority", "rules"),
    [
        ("db.prod.svc.cluster.local:80", ()),
        (AUTHORITY, ({"from": ["*"], "to": ["10.0.0.0/8:*", "[::/0]:*"]},)),
        (AUTHORITY, ({"from": ["*"], "to": [AUTHORITY], "deny": True}, WITHOUT_DNS)),
        (AUTHORITY, ({"from": [f"spiffe://{TRUST_DOMAIN}/ns/other/sa/*"], "to": ["*:*"]},)),
    ],
)
async def test_the_rules_come_first(
    ambient: Ambient, no_dns: None, authority: str, rules: tuple[dict[str, Any], ...]
) -> None:
    """Networks allow no name that is never looked up."""
    gateway = await ambient.start(rules=rules)
    near = ask(await ambient.member(), authority)
    assert await near.status() == 401
    assert (await body_of(near)).startswith(f"peer {CALLER} denied {authority}: ")
    line = await gateway.line()
    assert (line["status"], line["flags"], line["route"]) == (401, "DENY", "hbone")
    assert not ambient.world.service.asked


async def test_a_rule_that_asks_for_a_token(ambient: Ambient) -> None:
    """The issuer's keys are waited for before the service is asked."""
    issuer = Issuer()
    rule = WITHOUT_DNS | {"claims": {"email": ["*@example.com"]}}
    async with served(issuer) as keys:
        jwt = {"issuer": GOOGLE_ISSUER, "audiences": ["https://hgate.example"], "keys": keys.url}
        gateway = await ambient.world.start(ambient.route(), hbone=ambient.hbone(rule, jwt=jwt))
        peer = await ambient.member()
        token = issuer.mint("https://hgate.example", email="me@example.com")
        for _ in range(2):
            near = ask(peer, authorization=f"Bearer {token}")
            far = await ambient.world.service.request()
            assert (b"authorization", token.encode()) not in far.fields
            far.respond(200)
            assert await near.status() == 200
            await echoes(near, far)
            await ends(near, far)
            assert (await gateway.line())["route"] == ROUTE
        near = ask(peer)
        assert await near.status() == 401
        assert near[b"www-authenticate"] == b"Bearer"
        assert not ambient.world.service.asked


async def test_keys_that_cannot_be_fetched(ambient: Ambient) -> None:
    rule: dict[str, Any] = WITHOUT_DNS | {"claims": {}}
    jwt = {
        "issuer": GOOGLE_ISSUER,
        "audiences": ["https://hgate.example"],
        "keys": f"http://127.0.0.1:{closed_port()}/keys",
    }
    gateway = await ambient.world.start(ambient.route(), hbone=ambient.hbone(rule, jwt=jwt))
    near = ask(await ambient.member(), authorization=f"Bearer {Issuer().mint('https://hgate.example')}")
    assert await near.status() == 503
    assert (await body_of(near)).startswith("the token cannot be checked: ")
    assert (await gateway.line())["flags"] == "IDENTITY_ERROR"


@pytest.mark.parametrize(
    ("status", "text"),
    [(403, "no token was sent"), (404, "krun knows no such target"), (500, "answered 500")],
)
async def test_a_refusal_of_the_service(ambient: Ambient, status: int, text: str) -> None:
    gateway = await ambient.start()
    near = ask(await ambient.member())
    (await ambient.world.service.request()).respond(status, end=True)
    assert await near.status() == 503
    told = await body_of(near)
    assert told.startswith(f"answered {status}")
    assert text in told
    line = await gateway.line()
    assert (line["status"], line["flags"], line["route"]) == (503, "STATUS", ROUTE)


async def test_a_service_that_cannot_be_reached(ambient: Ambient) -> None:
    gateway = await ambient.start(ambient.route(connect=f"127.0.0.1:{closed_port()}"))
    near = ask(await ambient.member())
    assert await near.status() == 503
    assert "connect to http://db.example" in await body_of(near)
    line = await gateway.line()
    assert (line["status"], line["flags"]) == (503, "CONNECT")
    assert await gateway.metric("hbone_route_connections", route=ROUTE) == 0


async def test_a_service_that_does_not_answer(ambient: Ambient) -> None:
    gateway = await ambient.start(response_timeout="100ms")
    near = ask(await ambient.member())
    far = await ambient.world.service.request()
    assert await near.status() == 503
    assert await body_of(near) == "no response headers within 0.1 s"
    assert await far.broken() == CANCEL
    assert (await gateway.line())["flags"] == "UPSTREAM"


async def test_a_name_that_the_route_cannot_take(ambient: Ambient, no_dns: None) -> None:
    route = ambient.route(host="**", tunnel="http://{service}.example/_hbone/15008")
    gateway = await ambient.start(route, rules=({"from": ["*"], "to": ["*:*"]},))
    near = ask(await ambient.member(), "db.example.com:5432")
    assert await near.status() == 503
    assert "cannot take db.example.com:5432: {service} in {service}.example needs a name" in await body_of(
        near
    )
    assert (await gateway.line())["flags"] == "NO_ROUTE"


async def test_more_connections_than_the_route_may_have(ambient: Ambient) -> None:
    gateway = await ambient.start(ambient.route(max_connections=1))
    peer = await ambient.member()
    near, far = await ambient.open(peer)
    refused = ask(peer)
    assert await refused.status() == 503
    assert (
        await body_of(refused)
        == f"1 connections on route {ROUTE} are open, which is the route's max_connections"
    )
    assert (await gateway.line())["flags"] == "LIMIT"
    name = "hbone_limit_refusals_total"
    assert await gateway.metric(name, limit="max_connections_per_route") == 1
    await echoes(near, far)
    await ends(near, far)
    near, far = await ambient.open(peer)
    await ends(near, far)


async def test_a_client_by_sni_is_told_that_the_route_is_not_for_it(ambient: Ambient) -> None:
    gateway = await ambient.start()
    client = await ambient.world.client(hello(f"outbound_.5432_._.{NAME}"))
    assert await client.rest() == UNRECOGNIZED_NAME
    line = await gateway.line()
    assert line["flags"] == "NO_ROUTE"
    assert line["error"].endswith(
        "is for CONNECTs of the HBONE port, inner: hbone; mTLS by SNI needs a route of its own"
    )


async def test_a_route_without_inner_takes_no_connect(ambient: Ambient, target: TcpServer) -> None:
    """The name is looked up."""
    route = ambient.route(host="localhost", tunnel="http://db.example/_hbone/15008")
    del route["inner"]
    allowed = {"from": ["*"], "to": ["localhost:*", "127.0.0.0/8:*", "[::1]:*"]}
    await ambient.start(route, rules=(allowed,))
    near = ask(await ambient.member(), f"localhost:{target.port}")
    await target.accept()
    assert await near.status() == 200
    assert not ambient.world.service.asked


async def test_a_reload_changes_who_takes_a_name(ambient: Ambient) -> None:
    gateway = await ambient.start(ambient.route(host="other.prod.svc.cluster.local"))
    peer = await ambient.member()
    near = ask(peer)
    assert await near.status() == 503, "looked up, and not found"
    write_config(gateway.file, [ambient.route(), ambient.route(host="a.b.svc")], ambient.hbone())
    gateway.reload()
    await gateway.records.match("^reload: 2 routes from ")
    near, far = await ambient.open(peer)
    write_config(gateway.file, [], ambient.hbone())
    gateway.reload()
    await gateway.records.match("^reload: 0 routes from ")
    await echoes(near, far)
    await ends(near, far)


# The end of a tunnel.


async def test_three_mebibytes_both_ways_at_once(ambient: Ambient) -> None:
    gateway = await ambient.start()
    near, far = await ambient.open(await ambient.member())
    async with asyncio.TaskGroup() as all_at_once:
        all_at_once.create_task(near.send(BIG))
        all_at_once.create_task(far.send(BIG))
        there = all_at_once.create_task(far.read(len(BIG)))
        back = all_at_once.create_task(near.read(len(BIG)))
    assert (there.result(), back.result()) == (BIG, BIG)
    await ends(near, far)
    line = await gateway.line()
    assert (line["bytes_sent"], line["bytes_recv"], line["flags"]) == (len(BIG), len(BIG), "-")


@pytest.mark.parametrize("first", ["near", "far"])
async def test_either_end_ends_its_direction_only(ambient: Ambient, first: str) -> None:
    await ambient.start()
    near, far = await ambient.open(await ambient.member())
    one, other = (near, far) if first == "near" else (far, near)
    one.end()
    assert await other.rest() == b""
    sending = spawn(other.send(BIG), name="send")
    assert await one.read(len(BIG)) == BIG
    await sending
    other.end()
    assert await one.rest() == b""


async def full(near: PeerStream, far: PeerStream) -> bytes:
    """Sends until nobody takes any more, with a far side that does not read; what was sent."""
    far.window_held = True
    sent = bytearray()
    while True:
        await near.peer.answered()
        room = near.peer.window(near)
        if not room:
            return bytes(sent)
        part = os.urandom(room)
        await near.send(part)
        sent += part


@pytest.mark.parametrize("code", [NO_ERROR, CANCEL])
@pytest.mark.parametrize("far_has_ended", [True, False])
async def test_a_member_that_lets_go_loses_nothing_that_it_has_sent(
    ambient: Ambient, code: int, far_has_ended: bool
) -> None:
    """ztunnel ends double HBONE so, be the service's end there or not."""
    gateway = await ambient.start()
    peer = await ambient.member()
    near, far = await ambient.open(peer)
    sent = await full(near, far)
    if far_has_ended:
        far.end()
        assert await near.rest() == b""
    near.reset(code)
    await peer.answered()
    assert len(far.data) < len(sent), "some of it still waits in the gateway"
    far.release_window()
    assert await far.rest() == sent
    if not far_has_ended:
        far.end()
    line = await gateway.line()
    assert (line["flags"], line["bytes_sent"]) == ("-", len(sent))
    near, far = await ambient.open(peer)
    await ends(near, far)


async def test_a_member_that_lets_go_while_the_service_sends(ambient: Ambient) -> None:
    """What nobody wants any more is dropped, and keeps nobody's window."""
    gateway = await ambient.start()
    peer = await ambient.member()
    near, far = await ambient.open(peer)
    near.window_held = True
    sending = spawn(far.send(os.urandom(8 << 20)), name="send")
    await peer.until(lambda: len(near.data) >= 1 << 20)
    near.reset(CANCEL)
    assert await far.rest() == b""
    await sending
    far.end()
    assert (await gateway.line())["flags"] == "-"


async def test_a_service_that_resets_what_its_member_has_let_go_of(ambient: Ambient) -> None:
    """It may miss the close_notify; everything had gone to it."""
    gateway = await ambient.start()
    near, far = await ambient.open(await ambient.member())
    await near.send(b"bytes")
    near.reset(CANCEL)
    assert await far.rest() == b"bytes"
    far.reset(CONNECT_ERROR)
    line = await gateway.line()
    assert (line["flags"], line["bytes_sent"]) == ("-", 5)


async def test_a_member_that_breaks_off(ambient: Ambient) -> None:
    gateway = await ambient.start()
    near, far = await ambient.open(await ambient.member())
    near.reset(CONNECT_ERROR)
    assert await far.broken() == CANCEL
    assert (await gateway.line())["flags"] == "DOWNSTREAM_RESET"


async def test_a_service_that_breaks_off(ambient: Ambient) -> None:
    gateway = await ambient.start()
    near, far = await ambient.open(await ambient.member())
    far.reset(CANCEL)
    assert await near.broken() == CONNECT_ERROR
    assert (await gateway.line())["flags"] == "UPSTREAM_RESET"


async def test_a_member_whose_connection_is_lost(ambient: Ambient) -> None:
    gateway = await ambient.start()
    witness = await ambient.open(await ambient.member())
    peer = await ambient.member()
    _, far = await ambient.open(peer)
    peer.drop()
    assert await far.broken() == CANCEL
    assert (await gateway.line())["flags"] == "DOWNSTREAM_RESET"
    await echoes(*witness)


async def test_a_tunnel_that_holds_too_much_before_it_is_open(
    ambient: Ambient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory budget resets it: then nobody goes on asking the service for it."""
    ports: list[HboneTunnels] = []

    def make(*given: Any, **options: Any) -> HboneTunnels:
        ports.append(HboneTunnels(*given, **options))
        return ports[-1]

    monkeypatch.setattr("gateway.hbone.hbone_port.HboneTunnels", make)
    gateway = await ambient.start(ambient.route(cold_start="1m"))
    near = ask(await ambient.member())
    far = await ambient.world.service.request()
    (tunnel,) = ports[0].open
    tunnel.abort(OverloadError("it holds too much"))
    assert await far.broken() == CANCEL
    assert await near.status() == 503
    assert (await gateway.line())["flags"] == "OVERLOAD"
    assert await gateway.metric("hbone_listener_tunnels_open") == 0


# Members that leave before the answer.


@pytest.mark.parametrize("status", [200, 503])
async def test_a_member_that_leaves_before_the_answer(ambient: Ambient, status: int) -> None:
    """Its request is not reset before it is answered: so many resets would look like an attack."""
    gateway = await ambient.start()
    peer = await ambient.member()
    witness = await ambient.open(peer)
    near = ask(peer)
    far = await ambient.world.service.request()
    near.reset(CANCEL)
    await peer.answered()
    assert await gateway.metric("hbone_listener_tunnels_open") == 2, "it keeps its place"
    far.respond(status, end=status != 200)
    line = await gateway.line()
    assert (line["status"], line["flags"], line["bytes_sent"]) == (499, "DOWNSTREAM_RESET", 0)
    if status == 200:
        assert await far.broken() == CANCEL
    assert not ambient.world.service.asked, "nothing is asked again"
    assert await gateway.metric("hbone_listener_tunnels_open") == 1
    assert await gateway.metric("hbone_route_connections", route=ROUTE) == 1
    await echoes(*witness)


async def test_a_member_that_leaves_while_the_service_is_dialled(ambient: Ambient) -> None:
    """A listener with a full backlog would do; here the dial ends with the deadline."""
    async with TcpServer.listening() as silent:
        gateway = await ambient.start(ambient.route(connect=f"127.0.0.1:{silent.port}"))
        near = ask(peer := await ambient.member())
        there = await silent.accept()
        assert await there.read(3) == b"PRI"
        near.reset(CANCEL)
        await peer.answered()
        line = await gateway.line()
        assert (line["status"], line["flags"]) == (499, "DOWNSTREAM_RESET")


async def test_a_client_that_ends_in_the_middle_of_its_handshake(ambient: Ambient) -> None:
    gateway = await ambient.start()
    peer = await ambient.member()
    witness = await ambient.open(peer)
    port = int((await gateway.records.match(r"hbone on 127\.0\.0\.1:(\d+)"))[1])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(hello()[:100])
    writer.close()
    assert (await gateway.line())["flags"] == "TLS_FAILURE"
    await echoes(*witness)


async def test_a_gateway_that_stops_while_a_service_is_asked(ambient: Ambient) -> None:
    gateway = await ambient.start(drain_delay="0s", drain_timeout="100ms")
    near = ask(await ambient.member())
    far = await ambient.world.service.request()
    gateway.terminate()
    assert await near.broken() != NO_ERROR
    assert await gateway.exit_code() == 0
    assert await far.broken() != NO_ERROR
    assert (await gateway.lines())[-1]["flags"] == "STOPPED"


async def test_a_gateway_that_stops_waits_for_what_a_member_has_let_go_of(ambient: Ambient) -> None:
    """The member's connection has gone, and the service has yet to take what came on it."""
    gateway = await ambient.start(drain_delay="0s")
    peer = await ambient.member()
    near, far = await ambient.open(peer)
    far.window_held = True
    count = await near.fill()
    near.reset(CANCEL)
    await peer.answered()
    await peer.close()
    async with asyncio.timeout(PATIENCE_S):
        while await gateway.metric("hbone_listener_connections_open"):
            pass
    gateway.terminate()
    await gateway.records.match("draining: 1 connections")
    far.release_window()
    assert await far.rest() == bytes(count)
    far.end()
    assert await gateway.exit_code() == 0
    line = (await gateway.lines())[-1]
    assert (line["flags"], line["bytes_sent"]) == ("-", count)


# Every order of ends.


STEPS = 8
ORDERS = 60


def _act(chance: random.Random, end: StreamEnd) -> None:
    match chance.choice(["send", "send", "finish", "read", "stop", "break"]):
        case "send" if end.may_send:
            end.send(chance.choice([1, 1000, 70_000, 2 << 20]))
        case "finish" if end.may_send:
            end.finish()
        case "read":
            end.read()
        case "stop":
            end.stop_reading()
        case "break" if chance.random() < 0.3:
            end.break_off(chance.choice([NO_ERROR, CANCEL]))


def _look(member: StreamEnd, service: StreamEnd) -> None:
    """Holds what each end has got so far."""
    for one, other in ((member, service), (service, member)):
        count = len(other.received)
        assert other.received == one.bytes_sent(count), f"other bytes than were sent: {one}, {other}"
        if other.end == FIN:
            # A member that lets go has ended: TLS inside tells whether that was all.
            assert one.has_ended or (one is member and one.gone), f"an end that nobody said: {one}, {other}"
            assert count == one.sent, f"{count} of {one.sent} bytes: {one}, {other}"
        elif other.end == RST:
            assert one is service and one.gone and not one.delivered, f"a reset: {one}, {other}"


async def test_every_order_of_ends_is_exact_to_the_byte(ambient: Ambient) -> None:
    gateway = await ambient.start()
    peer = await ambient.member()
    witness = await ambient.open(peer)
    for seed in range(ORDERS):
        chance = random.Random(seed)
        near, far = await ambient.open(peer)
        member, service = ends = StreamEnd("member", near, 0), StreamEnd("service", far, 1)
        for _ in range(STEPS):
            _act(chance, chance.choice(ends))
            if chance.random() < 0.5:
                await peer.answered()
                await far.peer.answered()
            _look(member, service)
        async with asyncio.timeout(PATIENCE_S):
            while not all(end.gone or end.end for end in ends):
                for end in ends:
                    end.read()
                    end.finish()
                    end.pump()
                await peer.answered()
                await far.peer.answered()
        _look(member, service)
        line = await gateway.line()
        assert line["flags"] in (("-",) if not service.gone else ("-", "UPSTREAM_RESET")), f"{seed}: {line}"
    await echoes(*witness)
    assert len(await gateway.dump("/tunnels")) == 1


# Addresses in place of names.


VIP = "10.96.0.7"


@pytest.fixture
def handed_over(tmp_path: Path) -> Path:
    """The folder of the process at the API server, which knows of one Service."""
    folder = tmp_path / "run"
    folder.mkdir()
    cluster_files.write_routes(folder, [])
    cluster_files.write_addresses(folder, {VIP: NAME, "fd00::7": NAME})
    return folder


async def with_addresses(ambient: Ambient, folder: Path, *rules: dict[str, Any]) -> RunningGateway:
    """The gateway with these lists."""
    gateway = await ambient.start(ambient.route(), rules=rules)
    change_config(gateway.file, cluster={"folder": str(folder), "allow": []})
    gateway.reload()
    await gateway.records.match("^reload: 1 routes from ")
    return gateway


@pytest.mark.parametrize("authority", [f"{VIP}:5432", "[fd00::7]:5432", f"[::ffff:{VIP}]:5432"])
async def test_the_address_of_a_service(ambient: Ambient, handed_over: Path, authority: str) -> None:
    """The rules judge the name, and so does the route."""
    gateway = await with_addresses(ambient, handed_over)
    near = ask(await ambient.member(), authority, forwarded='for="10.1.2.3:4"')
    far = await ambient.world.service.request()
    assert far[b":authority"] == b"db.example"
    far.respond(200)
    assert await near.status() == 200
    await echoes(near, far)
    await ends(near, far)
    line = await gateway.line()
    assert (line["route"], line["flags"]) == (ROUTE, "-")


async def test_an_address_that_the_list_has_from_now_on(
    ambient: Ambient, handed_over: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_list, "WATCH_S", 0.01)
    await with_addresses(ambient, handed_over)
    peer = await ambient.member()
    near = ask(peer, "10.96.0.8:5432", forwarded="for=x")
    assert await near.status() == 401
    cluster_files.write_addresses(handed_over, {"10.96.0.8": NAME})
    async with asyncio.timeout(PATIENCE_S):
        while not ambient.world.service.asked:
            ask(peer, "10.96.0.8:5432", forwarded="for=x")
            await peer.answered()


@pytest.mark.parametrize("address", [VIP, "240.240.0.9", "10.96.0.99"])
async def test_the_name_is_in_the_request(ambient: Ambient, no_dns: None, address: str) -> None:
    """Without a cluster's list it is the client's word, which gives it no more than asking for the name."""
    await ambient.start()
    near, far = ask(await ambient.member(), f"{address}:5432"), await ambient.world.service.request()
    far.respond(200)
    assert await near.status() == 200
    await echoes(near, far)


async def test_the_list_counts_before_the_client_s_word(ambient: Ambient, handed_over: Path) -> None:
    await with_addresses(ambient, handed_over)
    ask(await ambient.member(), f"{VIP}:5432", forwarded="for=x;host=other.prod.svc.cluster.local")
    assert (await ambient.world.service.request())[b":authority"] == b"db.example"


@pytest.mark.parametrize(
    "rules",
    [
        ({"from": ["*"], "to": ["10.0.0.0/8:*"]},),
        ({"from": ["*"], "to": ["10.0.0.0/8:*"], "deny": True}, WITHOUT_DNS),
        ({"from": ["*"], "to": ["other.prod.svc.cluster.local:*"]},),
    ],
)
async def test_the_rules_check_the_name_of_an_address(
    ambient: Ambient, no_dns: None, rules: tuple[dict[str, Any], ...]
) -> None:
    """An address that is allowed makes no name allowed; one that is denied stays denied."""
    gateway = await ambient.start(rules=rules)
    near = ask(await ambient.member(), f"{VIP}:5432")
    assert await near.status() == 401
    assert f"denied {AUTHORITY}: " in await body_of(near)
    assert (await gateway.line())["flags"] == "DENY"
    assert not ambient.world.service.asked


@pytest.mark.parametrize(
    ("authority", "status", "text"),
    [
        ("10.200.0.1:5432", 401, "denied 10.200.0.1:5432: no rule allows it"),
        (
            "240.240.0.9:5432",
            503,
            "the client's mesh has made this address up for a name, and hgate",
        ),
        (
            "[2001:2::9]:5432",
            503,
            "the client's mesh has made this address up for a name, and hgate",
        ),
    ],
)
async def test_the_address_of_another_network_or_of_nobody(
    ambient: Ambient, handed_over: Path, authority: str, status: int, text: str
) -> None:
    allowed = {"from": ["*"], "to": ["240.0.0.0/4:*", "[2001::/16]:*"]}
    gateway = await with_addresses(ambient, handed_over, allowed, WITHOUT_DNS)
    witness = await ambient.open(peer := await ambient.member())
    near = ask(peer, authority, forwarded='for="10.1.2.3:4";host=elsewhere.example.com')
    assert await near.status() == status
    assert text in await body_of(near)
    assert (await gateway.line())["status"] == status
    await echoes(*witness)


async def test_an_address_whose_name_no_route_takes_is_connected(ambient: Ambient, target: TcpServer) -> None:
    await ambient.start(rules=({"from": ["*"], "to": ["127.0.0.0/8:*"]},))
    near = ask(await ambient.member(), f"127.0.0.1:{target.port}", forwarded="for=x;host=a.example.com")
    await target.accept()
    assert await near.status() == 200

"""The app's way into the mesh before a real HBONE port: local ports, CONNECT, SOCKS; what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import os
import ssl
import struct
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.rules.hbone_rules import Rule
from shared.address import Address
from shared.errors import Flag, LimitError
from shared.net.tls import certificate_folder
from shared.tasks import spawn
from tests.support.egress_world import EgressWorld, egress_world
from tests.support.hbone_port import CALLER, GATEWAY, TO_LOOPBACK, Mesh
from tests.support.hellos import hello
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.network import closed_port, unanswering
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, turned_away

MUCH_BYTES = 4 << 20

SOMEBODY = "spiffe://demo.local/ns/demo/sa/somebody"


async def answered(client: TcpPeer) -> bytes:
    """The head of the proxy's answer."""
    return await client.read_until(b"\r\n\r\n")


# Local ports.


async def test_a_local_port_leads_to_its_target(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        port = world.egress.ports[0].listen.port
        async with TcpPeer.connected(port) as client:
            target = await world.target.accept()
            await client.send(b"ping")
            assert await target.read(4) == b"ping"
            await target.send(b"pong")
            assert await client.read(4) == b"pong"
            client.end()
            assert await target.rest() == b""
            await target.send(b"after the end")
            target.end()
            assert await client.rest() == b"after the end"
        record = await world.record()
        assert (record.flag, record.status, record.route) == (Flag.NONE, 200, "egress/local")
        assert (record.sent_bytes, record.received_bytes) == (4, 17)
        assert record.name == f"localhost:{world.target.port}"
        line = await world.gateway.line()
        assert (line["identity"], line["traceparent"]) == (str(CALLER), record.traceparent)
        assert line["forwarded.for"] == record.peer


async def test_the_gateway_is_told_who_asks(tmp_path: Path) -> None:
    """As ztunnel tells it, beside the certificate."""
    asked: asyncio.Queue[PeerStream] = asyncio.Queue()

    def took(stream: PeerStream) -> None:
        asked.put_nowait(stream)
        stream.respond(503, end=True)

    mesh = Mesh(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    chain, key, _ = certificate_folder.find(mesh.member(GATEWAY)).all
    tls.load_cert_chain(chain, key)
    tls.set_alpn_protocols(["h2"])
    server = await asyncio.get_running_loop().create_server(
        lambda: Http2Peer(client=False, requested=took), "127.0.0.1", 0, ssl=tls
    )
    port = server.sockets[0].getsockname()[1]
    async with server, egress_world(tmp_path, gateway=Address("gateway.test", port), mesh=mesh) as world:
        await turned_away(world.egress.ports[0].listen.port)
        fields = dict((await asked.get()).fields)
        assert b"k8s.namespace.name=demo" in fields[b"baggage"].split(b",")


async def test_krun_looks_up_nothing_but_the_gateway(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        for where in (f"localhost:{world.target.port}", "nobody.invalid:80"):
            client = await world.asked(f"CONNECT {where} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            await answered(client)
            client.reset()
            await world.record()
        assert set(world.looked_up) == {"gateway.test"}


async def test_the_target_may_speak_first(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        async with TcpPeer.connected(world.egress.ports[0].listen.port) as client:
            target = await world.target.accept()
            await target.send(b"220 hello\r\n")
            assert await client.read_until(b"\n") == b"220 hello\r\n"
            client.reset()
        assert (await world.record()).flag in (Flag.NONE, Flag.DOWNSTREAM_RESET)


async def test_the_beginning_of_tls_is_not_lost(tmp_path: Path) -> None:
    body = hello()
    async with egress_world(tmp_path) as world:
        async with TcpPeer.connected(world.egress.ports[0].listen.port) as client:
            await client.send(body)
            target = await world.target.accept()
            assert await target.read(len(body)) == body
            client.end()
            target.end()
            assert await client.rest() == b""
        assert (await world.record()).sent_bytes == len(body)


async def test_a_local_port_without_its_target_resets_its_client(tmp_path: Path) -> None:
    async with egress_world(tmp_path, local=f"127.0.0.1:{closed_port()}") as world:
        await turned_away(world.egress.ports[0].listen.port)
        record = await world.record()
        assert (record.flag, record.status) == (Flag.STATUS, 503), record.error
        assert "connection refused" in str(record.error)


async def test_a_reset_of_the_target_is_one_for_the_client(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        async with TcpPeer.connected(world.egress.ports[0].listen.port) as client:
            target = await world.target.accept()
            await client.send(b"x")
            assert await target.read(1) == b"x"
            target.reset()
            assert await client.was_reset()
        assert (await world.record()).flag is Flag.UPSTREAM_RESET


async def test_a_silent_tunnel_is_reset(tmp_path: Path) -> None:
    async with egress_world(tmp_path, idle_timeout_s=0.1) as world:
        async with TcpPeer.connected(world.egress.ports[0].listen.port) as client:
            assert await client.was_reset()
        assert (await world.record()).flag is Flag.IDLE


async def test_a_client_that_leaves_while_the_gateway_works_ends_its_tunnel(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        async with TcpPeer.connected(world.egress.ports[0].listen.port) as client:
            target = await world.target.accept()
            client.reset()
            assert await target.was_reset()
        assert (await world.record()).flag is Flag.DOWNSTREAM_RESET
        assert world.egress.open_connections == 0


async def test_a_fault_of_ours_costs_one_tunnel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a fault")

    async with egress_world(tmp_path) as world:
        port = world.egress.ports[0].listen.port
        async with TcpPeer.connected(port) as witness:
            there = await world.target.accept()
            await there.send(b"x")
            assert await witness.read(1) == b"x"
            with monkeypatch.context() as patch:
                patch.setattr("agent.egress.egress_tunnel.Relay", broken)
                async with TcpPeer.connected(port) as client:
                    assert await client.was_reset()
            assert (await world.record()).flag is Flag.INTERNAL
            assert await (await world.target.accept()).was_reset()
            await there.send(b"y")
            assert await witness.read(1) == b"y"


# CONNECT.


async def test_connect_is_answered_once_the_target_is_there(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        client = await world.asked(
            f"CONNECT LocalHost.:{world.target.port} HTTP/1.1\r\nhost: x\r\n\r\nearly".encode()
        )
        assert (await answered(client)).startswith(b"HTTP/1.1 200 ")
        target = await world.target.accept()
        assert await target.read(5) == b"early"
        client.end()
        assert await target.rest() == b""
        await target.send(b"late")
        target.end()
        assert await client.rest() == b"late"
        record = await world.record()
        assert (record.route, record.name) == ("egress/connect", f"localhost:{world.target.port}")


async def test_connect_with_its_first_bytes_and_its_end(tmp_path: Path) -> None:
    """All in one packet: the bytes come before the end."""
    async with egress_world(tmp_path) as world:
        client = await world.client()
        client.send_soon(
            f"CONNECT localhost:{world.target.port} HTTP/1.1\r\nhost: x\r\n\r\nall of it".encode()
        )
        client.end()
        target = await world.target.accept()
        assert await target.rest() == b"all of it"
        target.end()
        assert (await client.rest()).endswith(b"\r\n\r\n")


async def test_much_behind_a_connect_is_all_there(tmp_path: Path) -> None:
    """More than a read, and more than is kept before the answer."""
    body = os.urandom(MUCH_BYTES)
    async with egress_world(tmp_path) as world:
        client = await world.client()
        client.send_soon(b"CONNECT localhost:%d HTTP/1.1\r\nhost: x\r\n\r\n" % world.target.port + body)
        client.end()
        target = await world.target.accept()
        assert hashlib.sha256(await target.rest()).digest() == hashlib.sha256(body).digest()
        target.end()
        await client.rest()


@pytest.mark.parametrize(
    ("where", "status", "why"),
    [
        ("denied.demo.svc:80", 403, "HBONE_EGRESS_DENY has denied.demo.svc:*"),
        ("other.demo.svc:81", 403, "HBONE_EGRESS_ALLOW does not have it"),
        ("10.0.0.1:80", 403, "HBONE_EGRESS_ALLOW does not have it"),
        ("10.9.9.9:80", 403, "no rule allows it"),
        ("127.0.0.1:1", 502, "connection refused"),
        ("127.0.0.1:15001", 403, "mesh proxy's own"),
        ("other.demo.svc", 400, "no port"),
        ("other.demo.svc:0", 400, "port 0"),
        ("a b:80", 400, None),
        ("[::1%25eth0]:80", 400, None),
        ("x" * 400 + ":80", 400, "over 300 bytes"),
        ("user@other.demo.svc:80", 400, "out of place"),
    ],
)
async def test_connects_that_are_refused(tmp_path: Path, where: str, status: int, why: str | None) -> None:
    allow = ("*.demo.svc:80", "127.0.0.0/8:*", "10.9.9.9:80")
    async with egress_world(tmp_path, allow=allow, deny=("denied.demo.svc:*",)) as world:
        client = await world.asked(f"CONNECT {where} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        said = (await client.rest()).decode()
        assert said.startswith(f"HTTP/1.1 {status} "), said
        if why is not None:
            assert why in said
            assert not (await world.record()).opened


async def test_deny_by_identity_at_hgate(tmp_path: Path) -> None:
    async with egress_world(tmp_path, Rule((SOMEBODY,), ("*:*", "127.0.0.0/8:*"))) as world:
        client = await world.asked(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\nhost: x\r\n\r\n" % world.target.port)
        said = (await client.rest()).decode()
        assert said.startswith("HTTP/1.1 403 ")
        assert f"peer {CALLER} denied" in said
        record = await world.record()
        assert (record.status, record.flag) == (401, Flag.STATUS)
        assert world.target.count == 0


async def test_a_gateway_that_is_not_the_one_that_is_wanted(tmp_path: Path) -> None:
    async with egress_world(tmp_path, peers=(SOMEBODY,)) as world:
        client = await world.asked(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\nhost: x\r\n\r\n" % world.target.port)
        said = (await client.rest()).decode()
        assert said.startswith("HTTP/1.1 502 ")
        assert "denied" in said
        assert world.egress.shown()["gateway"]["last_failure"]
        assert world.target.count == 0


async def test_a_gateway_that_is_revoked(tmp_path: Path) -> None:
    async with egress_world(tmp_path, gateway_revoked=True) as world:
        client = await world.asked(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\nhost: x\r\n\r\n" % world.target.port)
        said = (await client.rest()).decode()
        assert said.startswith("HTTP/1.1 502 ")
        assert "revoked" in said
        assert world.target.count == 0


async def test_no_gateway_is_a_502(tmp_path: Path) -> None:
    async with egress_world(tmp_path, gateway=Address("127.0.0.1", closed_port())) as world:
        client = await world.asked(b"CONNECT localhost:80 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.rest()).startswith(b"HTTP/1.1 502 ")
        assert (await world.record()).flag is Flag.CONNECT


async def test_a_gateway_that_says_nothing_is_a_504(tmp_path: Path) -> None:
    with unanswering() as port:
        async with egress_world(tmp_path, gateway=Address("127.0.0.1", port), timeout_s=0.1) as world:
            client = await world.asked(b"CONNECT localhost:80 HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await client.rest()).startswith(b"HTTP/1.1 504 ")


async def test_a_connect_with_a_body_is_refused(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        client = await world.asked(
            b"CONNECT localhost:80 HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc"
        )
        assert (await client.rest()).startswith(b"HTTP/1.1 400 ")


# SOCKS.


def socks5(host: str, port: int) -> bytes:
    return bytes((5, 1, 0)) + bytes((5, 1, 0, 3, len(host))) + host.encode() + struct.pack("!H", port)


async def test_socks_leads_names_to_the_gateway(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        client = await world.asked(socks5("localhost", world.target.port) + b"early")
        assert await client.read(2) == bytes((5, 0))
        assert (await client.read(10))[1] == 0
        target = await world.target.accept()
        assert await target.read(5) == b"early"
        target.end()
        client.end()
        assert await client.rest() == b""
        record = await world.record()
        assert (record.route, record.name) == ("egress/socks", f"localhost:{world.target.port}")


@pytest.mark.parametrize(
    ("request_", "reply"),
    [
        (socks5("other.demo.svc", 81), 2),
        (socks5("10.9.9.9", 80), 2),
        (socks5("127.0.0.1", 1), 5),
        (bytes((5, 1, 0, 5, 2, 0, 1)) + bytes(6), 7),
        (bytes((5, 1, 0, 5, 1, 0, 9)) + bytes(6), 8),
        (socks5("a b", 80), 8),
    ],
)
async def test_socks_that_is_refused(tmp_path: Path, request_: bytes, reply: int) -> None:
    async with egress_world(tmp_path, allow=("10.9.9.9:80", "127.0.0.0/8:*")) as world:
        client = await world.asked(request_)
        assert await client.read(2) == bytes((5, 0))
        assert (await client.rest())[1] == reply
        assert not (await world.record()).opened


async def test_socks_with_a_password_is_refused(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        client = await world.asked(bytes((5, 1, 2)))
        assert await client.rest() == bytes((5, 255))
        assert (await world.record()).flag is Flag.BAD_REQUEST


async def test_socks_without_a_gateway(tmp_path: Path) -> None:
    async with egress_world(tmp_path, gateway=Address("127.0.0.1", closed_port())) as world:
        client = await world.asked(socks5("localhost", 80))
        assert (await client.rest())[3] == 3  # network unreachable


# Limits, and the end.


async def test_more_connections_than_there_may_be_are_reset(tmp_path: Path) -> None:
    async with egress_world(tmp_path, most=1) as world:
        port = world.egress.ports[0].listen.port
        async with TcpPeer.connected(port) as client:
            await world.target.accept()
            await turned_away(port)
            await turned_away(world.proxy)
            client.reset()
        async with asyncio.timeout(PATIENCE_S):
            await world.egress.emptied()
        async with TcpPeer.connected(port):
            await world.target.accept()
        values = {family.name: family.samples for family in world.egress.families()}
        assert values["hbone_limit_refusals"][0].value == 2


async def test_nothing_is_opened_where_memory_is_short(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        world.refusal = LimitError("too much is held", "HBONE_MAX_BUFFERED")
        await turned_away(world.egress.ports[0].listen.port)
        client = await world.asked(b"CONNECT localhost:80 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.rest()).startswith(b"HTTP/1.1 503 ")
        assert {(await world.record()).flag for _ in range(2)} == {Flag.LIMIT}


async def test_krun_s_end_ends_open_tunnels(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        async with TcpPeer.connected(world.egress.ports[0].listen.port) as client:
            await world.target.accept()
            assert len(world.egress.tunnels) == 1
            closing = spawn(world.egress.close(), name="close")
            assert await client.was_reset()
            await closing
        assert (await world.record()).flag is Flag.STOPPED


@pytest.mark.parametrize(
    "words", [b"", bytes((5, 1)), bytes((5, 1, 0, 5)), b"C", b"GET http://x/ HTTP/1.1\r\n"]
)
async def test_a_client_that_says_too_little_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: bytes
) -> None:
    for limit in ("REQUEST_S", "IDLE_S"):
        monkeypatch.setattr(f"agent.egress.egress_proxy.{limit}", 0.05)
    async with egress_world(tmp_path) as world:
        client = await world.asked(words)
        with suppress(ConnectionResetError):
            assert await client.rest() in (b"", bytes((5, 0)))  # what SOCKS says of a greeting


async def test_what_is_open_is_shown(tmp_path: Path) -> None:
    async with egress_world(tmp_path) as world:
        client = await world.asked(b"CONNECT localhost:%d HTTP/1.1\r\nhost: x\r\n\r\n" % world.target.port)
        await answered(client)
        shown = world.egress.shown()
        assert (shown["gateway"]["connections"], shown["open"]) == (1, 1)
        assert [one["target"] for one in shown["ports"]] == [f"localhost:{world.target.port}"]
        assert [one.open_streams for one in world.egress.connections] == [1]


async def test_many_at_once_share_connections(tmp_path: Path) -> None:
    """Two hundred, each with its own bytes."""

    async def converse(world: EgressWorld, number: int) -> bool:
        body = b"%d\n" % number
        client = await world.asked(b"CONNECT localhost:%d HTTP/1.1\r\nhost: x\r\n\r\n" % world.target.port)
        await answered(client)
        await client.send(body)
        back = await client.read_until(b"\n")
        await client.close()
        return back == body

    async def echo(world: EgressWorld) -> None:
        peers = [await world.target.accept() for _ in range(200)]
        for peer in peers:
            await peer.send(await peer.read_until(b"\n"))
            peer.end()

    async with egress_world(tmp_path, TO_LOOPBACK) as world:
        echoing = spawn(echo(world), name="echo")
        async with asyncio.timeout(3 * PATIENCE_S):
            assert all(await asyncio.gather(*(converse(world, number) for number in range(200))))
            await echoing
        shown = world.egress.shown()
        assert 2 <= shown["gateway"]["connections"] <= 4

"""What the HBONE port answers, and what becomes of a tunnel, with real targets; the h2 library asks."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.hbone import hbone_tunnel
from gateway.rules.hbone_rules import Rule, Rules
from shared.address import Address
from shared.errors import OverloadError, StreamResetError, UnavailableError
from shared.http2.frames import CANCEL, REFUSED_STREAM
from shared.net.names.endpoint import Endpoint
from shared.net.relay import tunnel_clock
from shared.tasks import running
from shared.trust.peer_patterns import TrustDomain
from shared.trust.spiffe import SpiffeId
from tests.support import hbone_port
from tests.support.hbone_port import CALLER, GATEWAY, TO_LOOPBACK, TRUST_DOMAIN, HbonePort, Mesh
from tests.support.http2_peer import LOST, Http2Peer, PeerStream
from tests.support.metadata_server import closed_port
from tests.support.network import needs_ipv6
from tests.support.revocation import Hierarchy, end_in, put, revocation_list, serial_in
from tests.support.running_gateway import Records
from tests.support.tcp_peer import PATIENCE_S, TcpPeer, TcpServer
from tests.support.wall_clock import Clock

STRANGER = SpiffeId.of_workload(TRUST_DOMAIN, "other", "stranger")
BIG = os.urandom(3 << 20)
CONNECT_ERROR = 10


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[HbonePort]:
    async with hbone_port.serving(tmp_path) as port:
        yield port


@pytest.fixture
async def peer(port: HbonePort) -> AsyncIterator[Http2Peer]:
    async with port.caller() as peer:
        yield peer


def ask(peer: Http2Peer, authority: str, **fields: str) -> PeerStream:
    """Asks for a tunnel, with more headers if there are some."""
    more = [(name.encode(), value.encode()) for name, value in fields.items()]
    return peer.request(b"CONNECT", b"", more, authority=authority.encode())


async def opened(peer: Http2Peer, target: TcpServer) -> tuple[PeerStream, TcpPeer]:
    """Both ends of an open tunnel."""
    stream = ask(peer, f"127.0.0.1:{target.port}")
    there = await target.accept()
    assert await stream.status() == 200
    return stream, there


# A tunnel.


async def test_a_tunnel_from_request_to_line(port: HbonePort, peer: Http2Peer, target: TcpServer) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    stream = ask(
        peer,
        f"localhost:{target.port}",
        baggage="k8s.namespace.name=demo,service.name=client",
        forwarded='for="10.1.2.3:44312";host=hello',
        traceparent=trace,
    )
    there = await target.accept()
    assert await stream.status() == 200
    assert stream.fields == [(b":status", b"200")]
    await stream.send(b"ping")
    assert await there.read(4) == b"ping"
    await there.send(b"and back")
    assert await stream.read(8) == b"and back"
    assert port.value("hbone_tunnels_open", route="hbone") == 1
    assert port.value("hbone_sent_bytes_total", route="hbone") == 4, "counted while it is open"
    [row] = port.listener.rows()
    assert (row["identity"], row["bytes_sent"], row["bytes_recv"]) == (str(CALLER), 4, 8)
    stream.end()
    there.end()
    assert await stream.rest() == b""
    line = await port.line()
    assert {key: line[key] for key in line if key not in ("timestamp", "setup", "duration")} == {
        "severity": "INFO",
        "message": "connection complete",
        "logger": "hbone.access",
        "component": "hgate",
        "src.addr": line["src.addr"],
        "route": "hbone",
        "dst.addr": f"127.0.0.1:{target.port}",
        "tunnel.target": f"localhost:{target.port}",
        "stream": stream.number,
        "status": 200,
        "identity": str(CALLER),
        "forwarded.for": "10.1.2.3:44312",
        "traceparent": trace,
        "bytes_sent": 4,
        "bytes_recv": 8,
        "flags": "-",
    }
    assert port.value("hbone_sent_bytes_total", route="hbone") == 4, "each byte once"
    assert port.value("hbone_received_bytes_total", route="hbone") == 8
    assert port.value("hbone_tunnels_closed_total", route="hbone", flags="-") == 1
    assert port.value("hbone_tunnel_setup_seconds_count") == 1
    assert port.listener.open_tunnels == 0


async def test_three_mebibytes_both_ways_at_once(peer: Http2Peer, target: TcpServer) -> None:
    stream, there = await opened(peer, target)
    there.send_soon(BIG)
    there.end()
    async with asyncio.TaskGroup() as both:
        both.create_task(stream.send(BIG))
        got = both.create_task(stream.rest())
        sent = both.create_task(there.read(len(BIG)))
    assert (got.result(), sent.result()) == (BIG, BIG)
    stream.end()
    assert await there.rest() == b""


async def test_either_end_ends_its_direction_only(peer: Http2Peer, target: TcpServer) -> None:
    stream, there = await opened(peer, target)
    stream.end()
    assert await there.rest() == b""
    await there.send(BIG)
    there.end()
    assert await stream.rest() == BIG
    stream, there = await opened(peer, target)
    there.end()
    assert await stream.rest() == b""
    await stream.send(BIG)
    stream.end()
    assert await there.rest() == BIG


async def test_a_reset_is_passed_on(port: HbonePort, peer: Http2Peer, target: TcpServer) -> None:
    stream, there = await opened(peer, target)
    stream.reset(CANCEL)
    assert await there.was_reset()
    assert (await port.line())["flags"] == "DOWNSTREAM_RESET"
    stream, there = await opened(peer, target)
    there.reset()
    assert await stream.broken() == CONNECT_ERROR
    assert (await port.line())["flags"] == "UPSTREAM_RESET"


@needs_ipv6
async def test_a_target_with_ipv6(port: HbonePort, peer: Http2Peer) -> None:
    listening = socket.create_server(("::1", 0), family=socket.AF_INET6)
    with listening:
        stream = ask(peer, f"[::1]:{listening.getsockname()[1]}")
        assert await stream.status() == 200
        stream.reset(CANCEL)
    assert (await port.line())["dst.addr"].startswith("[::1]:")


# Refused.


@pytest.mark.parametrize(
    ("method", "authority", "status", "reason", "flag"),
    [
        (b"GET", b"a:80", 405, b"a tunnel is opened with CONNECT\n", "BAD_REQUEST"),
        (b"POST", b"127.0.0.1:80", 405, b"a tunnel is opened with CONNECT\n", "BAD_REQUEST"),
        (b"CONNECT", b"a", 400, b":authority: no port: write HOST:PORT\n", "BAD_REQUEST"),
        (b"CONNECT", b"127.1:80", 400, b":authority: '127.1' is no host name", "BAD_REQUEST"),
        (b"CONNECT", b"127.0.0.1:15008", 400, b":authority: no tunnel leads to port 15008", "BAD_REQUEST"),
        (b"CONNECT", b"10.0.0.1:80", 401, b"peer " + str(CALLER).encode() + b" denied", "DENY"),
    ],
)
async def test_a_refusal_says_why(
    port: HbonePort, peer: Http2Peer, method: bytes, authority: bytes, status: int, reason: bytes, flag: str
) -> None:
    stream = peer.request(method, b"/", authority=authority)
    assert await stream.status() == status
    assert dict(stream.fields).get(b"allow") == (b"CONNECT" if status == 405 else None)
    body = await stream.rest()
    assert body.startswith(reason)
    line = await port.line()
    assert (line["message"], line["status"], line["flags"]) == ("connection refused", status, flag)
    assert (line["identity"], line["tunnel.target"]) == (str(CALLER), authority.decode())
    assert line["error"] == body.decode().rstrip("\n")
    assert port.value("hbone_connections_refused_total", flags=flag) == 1
    assert (port.listener.open_tunnels, port.listener.open_connections) == (0, 1)


async def test_extended_connect_is_another_thing(port: HbonePort, peer: Http2Peer) -> None:
    """RFC 8441's, which nobody was told that we speak."""
    more = [(b":protocol", b"bytestream"), (b":scheme", b"https"), (b":path", b"/")]
    stream = peer.request(b"CONNECT", b"", more, authority=b"127.0.0.1:80")
    assert await stream.status() == 400
    assert b"plain CONNECT" in await stream.rest()


async def test_a_name_that_stands_for_this_machine(tmp_path: Path, target: TcpServer) -> None:
    """`*` leads everywhere but here: the admin port listens on loopback."""
    everything = Rule(("*",), ("*:*",))
    async with hbone_port.serving(tmp_path, everything) as port, port.caller() as peer:
        for name in ("localhost", "127.0.0.1"):
            stream = ask(peer, f"{name}:{target.port}")
            assert await stream.status() == 401
            assert "no rule allows it" in (await port.line())["error"]
        assert target.count == 0


async def test_rules_can_be_replaced(port: HbonePort, peer: Http2Peer, target: TcpServer) -> None:
    stream, there = await opened(peer, target)
    port.listener.tunnels.rules = Rules([])
    assert await ask(peer, f"127.0.0.1:{target.port}").status() == 401
    await stream.send(b"still open")
    assert await there.read(10) == b"still open"


async def test_a_target_that_refuses(port: HbonePort, peer: Http2Peer) -> None:
    gone = closed_port()
    stream = ask(peer, f"127.0.0.1:{gone}")
    assert await stream.status() == 503
    assert await stream.rest() == f"connect to 127.0.0.1:{gone}: connection refused\n".encode()
    line = await port.line()
    assert (line["status"], line["flags"]) == (503, "CONNECT")


async def test_a_name_that_nobody_has(tmp_path: Path) -> None:
    rule = Rule(("*",), ("*.invalid:80",))
    async with hbone_port.serving(tmp_path, rule) as port, port.caller() as peer:
        stream = ask(peer, "hello.invalid:80")
        assert await stream.status() == 503
        assert (await stream.rest()).startswith(b"connect to hello.invalid:80: ")


async def test_a_target_that_does_not_answer(tmp_path: Path, full_port: int) -> None:
    async with hbone_port.serving(tmp_path, connect_timeout_s=0.2) as port, port.caller() as peer:
        stream = ask(peer, f"127.0.0.1:{full_port}")
        assert await stream.status() == 503
        assert (await stream.rest()).endswith(b": no answer within 0.2 s\n")


async def test_one_tunnel_too_many(tmp_path: Path, target: TcpServer) -> None:
    async with hbone_port.serving(tmp_path, max_tunnels=2) as port, port.caller() as peer:
        (first, _), _ = [await opened(peer, target) for _ in range(2)]
        stream = ask(peer, f"127.0.0.1:{target.port}")
        assert await stream.status() == 503
        assert (await port.line())["flags"] == "LIMIT"
        first.reset(CANCEL)
        assert (await port.line())["flags"] == "DOWNSTREAM_RESET"
        await opened(peer, target)


# The end.


async def test_a_drain_lets_tunnels_finish(port: HbonePort, peer: Http2Peer, target: TcpServer) -> None:
    stream, there = await opened(peer, target)
    number = port.port
    async with port.caller() as idle:
        await port.until(2)
        await port.listener.drain()
        await idle.until(lambda: idle.goaway and idle.lost)
    await peer.until(lambda: peer.goaway)
    await peer.answered()  # so the port knows that it is known
    await stream.send(b"in peace")
    assert await there.read(8) == b"in peace"
    late = ask(peer, f"127.0.0.1:{target.port}")
    assert await late.broken() != LOST
    with pytest.raises(ConnectionRefusedError):
        await TcpPeer.connect(number)
    stream.end()
    there.end()
    assert await stream.rest() == b""
    await port.until(0)
    assert (await port.line())["flags"] == "-"


async def test_a_drain_serves_who_does_not_know_of_it(
    port: HbonePort, peer: Http2Peer, target: TcpServer
) -> None:
    await peer.answered()
    peer.pause()  # as if it were far away
    await port.listener.drain()
    stream = ask(peer, f"127.0.0.1:{target.port}")
    there = await target.accept()
    assert not peer.goaway
    peer.resume()
    assert await stream.status() == 200
    assert peer.goaway
    await there.send(b"in time")
    there.end()
    stream.end()
    assert await stream.rest() == b"in time"
    await peer.until(lambda: peer.lost)
    assert (await port.line())["flags"] == "-"


async def test_the_end_breaks_tunnels_off(port: HbonePort, peer: Http2Peer, target: TcpServer) -> None:
    stream, there = await opened(peer, target)
    await port.listener.close(StreamResetError("the gateway stops", CANCEL))
    assert await there.was_reset()
    await stream.broken()
    line = await port.line()
    assert (line["flags"], line["error"]) == ("UPSTREAM_RESET", "the gateway stops")
    assert port.listener.open_tunnels == 0
    await port.until(0)


async def test_the_end_leaves_no_dial_behind(port: HbonePort, peer: Http2Peer, full_port: int) -> None:
    await peer.answered()
    before = running()
    ask(peer, f"127.0.0.1:{full_port}")
    await peer.answered()
    assert (port.listener.open_tunnels, running()) == (1, before + 1)
    await port.listener.close()
    assert (port.listener.open_tunnels, running()) == (0, before)
    assert (await port.line())["status"] == 503


async def test_a_tunnel_that_ends_while_its_target_is_connected_was_never_open(
    port: HbonePort, peer: Http2Peer, target: TcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that the memory budget picks; nobody goes on connecting its target."""
    connecting, ended = asyncio.Event(), asyncio.Event()

    async def connect(_: list[Endpoint]) -> socket.socket:
        connecting.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    monkeypatch.setattr(hbone_tunnel, "connect", connect)
    stream = ask(peer, f"127.0.0.1:{target.port}")
    async with asyncio.timeout(PATIENCE_S):
        await connecting.wait()
    [tunnel] = port.listener.tunnels.open
    tunnel.abort(OverloadError("too much is held"))
    assert await stream.status() == 503
    async with asyncio.timeout(PATIENCE_S):
        await ended.wait()
    assert target.count == 0
    assert port.value("hbone_tunnels_open", route="hbone") == 0
    assert port.value("hbone_tunnel_setup_seconds_count") == 0
    assert "setup" not in await port.line()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"certificates": Path("/nonexistent")}, "certificates.pem: No such file or directory"),
        ({"listen": (Address("192.0.2.1", 15008),)}, "cannot listen on 192.0.2.1:15008"),
    ],
)
async def test_a_start_that_fails_says_why(tmp_path: Path, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(UnavailableError, match=error):
        async with hbone_port.serving(tmp_path, TO_LOOPBACK, **settings):
            pass


# Limits.


async def test_one_tunnel_of_an_identity_too_many(tmp_path: Path, target: TcpServer) -> None:
    other = SpiffeId.of_workload(TRUST_DOMAIN, "demo", "other")
    rule = Rule((str(CALLER), str(other)), TO_LOOPBACK.targets)
    async with (
        hbone_port.serving(tmp_path, rule, max_tunnels_per_identity=1) as port,
        port.caller() as peer,
        port.caller(other) as another,
    ):
        first, _ = await opened(peer, target)
        refused = ask(peer, f"127.0.0.1:{target.port}")
        assert await refused.status() == 503
        line = await port.line()
        assert (line["flags"], line["identity"]) == ("LIMIT", str(CALLER))
        assert line["error"] == f"1 tunnels of {CALLER} are open, which is max_tunnels_per_identity"
        await opened(another, target)
        first.reset(CANCEL)
        await port.line()
        await opened(peer, target)


async def test_a_silent_tunnel_is_reset(
    tmp_path: Path, target: TcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel_clock, "LEAST_INTERVAL_S", 0.02)
    async with hbone_port.serving(tmp_path, idle_timeout_s=0.2) as port, port.caller() as peer:
        stream, there = await opened(peer, target)
        assert await stream.broken() == CONNECT_ERROR
        assert await there.was_reset()
        assert (await port.line())["flags"] == "IDLE"
        assert port.value("hbone_tunnels_closed_total", route="hbone", flags="IDLE") == 1


async def test_an_old_tunnel_at_rest_ends_in_order(
    tmp_path: Path, target: TcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel_clock, "LEAST_INTERVAL_S", 0.02)
    async with hbone_port.serving(tmp_path, max_tunnel_lifetime_s=0.5) as port, port.caller() as peer:
        stream, there = await opened(peer, target)
        assert await stream.rest() == b""
        await stream.send(b"close_notify")
        stream.end()
        assert await there.rest() == b"close_notify"
        there.end()
        assert (await port.line())["flags"] == "LIFETIME"


async def test_limits_can_be_changed(tmp_path: Path, target: TcpServer) -> None:
    async with hbone_port.serving(tmp_path) as port, port.caller() as peer:
        await opened(peer, target)
        port.listener.apply(replace(port.listener.tunnels.settings, max_tunnels=1, max_connections=1))
        assert await ask(peer, f"127.0.0.1:{target.port}").status() == 503
        assert port.value("hbone_listener_tunnels_limit") == 1
        assert port.value("hbone_listener_connections_limit") == 1


# Certificates that end.


async def test_a_member_whose_certificate_ends_is_let_go(
    tmp_path: Path, target: TcpServer, clock: Clock
) -> None:
    """In two steps, so that a request on its way is served; and noticed without one."""
    async with hbone_port.serving(tmp_path, wall_clock=clock) as port:
        tls = port.mesh.tls(port.mesh.member(CALLER))
        clock.now = end_in(port.mesh.folder_of(CALLER)) - 0.1
        async with Http2Peer.connected(port.port, tls) as peer:
            stream, there = await opened(peer, target)
            peer.pause()
            with Records() as records:
                clock.turn(0.2)
                await records.match(f"{CALLER} has expired, at .*: no new tunnels, open ones have 20 s$")
            late = ask(peer, f"127.0.0.1:{target.port}")
            there_too = await target.accept()
            assert not peer.goaway
            peer.resume()
            assert await late.status() == 200
            assert peer.goaway
            for one, far in ((stream, there), (late, there_too)):
                await one.send(b"still here")
                one.end()
                assert await far.rest() == b"still here"
                far.end()
                assert await one.rest() == b""
                assert (await port.line())["flags"] == "-"
            await peer.until(lambda: peer.lost)
        await port.until(0)


async def test_a_certificate_that_ends_by_the_real_clock(port: HbonePort) -> None:
    """A connection that is at rest is closed, so that the next tunnel is opened with a newer certificate."""
    tls = port.mesh.tls(port.mesh.member(CALLER, lifetime_s=4.0))
    async with Http2Peer.connected(port.port, tls) as peer:
        assert await ask(peer, "10.0.0.1:1").status() == 401
        await peer.until(lambda: peer.lost)
        assert peer.goaway
        assert time.time() >= end_in(port.mesh.folder_of(CALLER))


async def test_after_the_drain_timeout_its_tunnels_are_broken_off(
    tmp_path: Path, target: TcpServer, clock: Clock
) -> None:
    async with hbone_port.serving(tmp_path, drain_timeout_s=0.05, wall_clock=clock) as port:
        tls = port.mesh.tls(port.mesh.member(CALLER))
        clock.now = end_in(port.mesh.folder_of(CALLER)) - 0.1
        async with Http2Peer.connected(port.port, tls) as peer:
            stream, there = await opened(peer, target)
            clock.turn(0.2)
            assert await there.was_reset()
            await stream.broken()
            await peer.until(lambda: peer.lost)
            assert peer.goaway
        line = await port.line()
        assert (line["flags"], line["status"], line["identity"]) == ("DENY", 200, str(CALLER))
        assert line["error"] == f"peer certificate denied: that of {CALLER} has expired"
        await port.until(0)


async def test_a_machine_that_slept_lets_no_expired_member_open_a_tunnel(
    tmp_path: Path, target: TcpServer, clock: Clock
) -> None:
    """Its timers have not noticed; the member may ask again on a connection with a newer certificate."""
    async with hbone_port.serving(tmp_path, wall_clock=clock) as port, port.caller() as peer:
        stream, there = await opened(peer, target)
        clock.turn(30 * 86400)
        assert await ask(peer, f"127.0.0.1:{target.port}").broken() == REFUSED_STREAM
        line = await port.line()
        assert (line["message"], line["flags"]) == ("connection refused", "DENY")
        assert (line["identity"], line["tunnel.target"]) == (str(CALLER), f"127.0.0.1:{target.port}")
        assert line["error"] == f"peer certificate denied: that of {CALLER} has expired"
        assert port.value("hbone_connections_refused_total", flags="DENY") == 1
        await peer.until(lambda: peer.goaway)
        await stream.send(b"has its drain timeout")
        stream.end()
        assert await there.rest() == b"has its drain timeout"
        there.end()
        assert await stream.rest() == b""
        await peer.until(lambda: peer.lost)


# Certificates that are revoked.


async def test_a_member_that_is_revoked_later_loses_all(tmp_path: Path, target: TcpServer) -> None:
    crl = tmp_path / "crl.pem"
    mesh = Mesh(tmp_path)
    mesh.member(GATEWAY)
    rules = (Rule(("*",), ("127.0.0.0/8:*",)),)
    async with hbone_port.serving(tmp_path, *rules, mesh=mesh, crl=crl, lists=()) as port:
        watch = port.listener.revocations
        assert watch is not None
        async with port.caller() as peer, port.caller(STRANGER) as other:
            stream, there = await opened(peer, target)
            untouched, _ = await opened(other, target)
            put(crl, revocation_list(mesh.authority, serial_in(mesh.folder_of(CALLER))))
            await watch.check_files()
            await stream.broken()
            await peer.until(lambda: peer.lost)
            assert peer.goaway
            with pytest.raises(ConnectionResetError):
                await there.read(1)
            line = await port.line()
            assert (line["flags"], line["identity"]) == ("DENY", str(CALLER))
            assert "it is revoked: serial number" in line["error"]
            await untouched.send(b"still there")
            assert watch.ended == 1 and port.listener.open_tunnels == 1


async def test_a_revoked_member_is_refused(tmp_path: Path) -> None:
    crl = tmp_path / "crl.pem"
    mesh = Mesh(tmp_path)
    revoked = serial_in(mesh.member(CALLER))
    async with hbone_port.serving(tmp_path, mesh=mesh, crl=crl, lists=(revoked,)) as port:
        async with Http2Peer.connected(port.port, mesh.tls(mesh.folder_of(CALLER))) as peer:
            await peer.until(lambda: peer.lost)
            assert peer.goaway
        line = await port.line()
        assert (line["message"], line["flags"]) == ("connection refused", "DENY")
        assert "it is revoked: serial number" in line["error"]
        assert port.listener.revocations is not None and port.listener.revocations.rejected == 1
        async with port.caller() as peer:  # with a new certificate
            await peer.answered()
        await port.until(connections=0)


async def test_a_member_of_an_alias_is_one_of_ours(tmp_path: Path, target: TcpServer) -> None:
    mesh = Mesh(tmp_path, authority=Hierarchy().root)  # which names no trust domain, as Istio's
    rule = Rule((f"spiffe://{TRUST_DOMAIN}/ns/de*/sa/*",), ("127.0.0.0/8:*",))
    trust = TrustDomain(TRUST_DOMAIN, ("old.local",))
    async with hbone_port.serving(tmp_path, rule, mesh=mesh, trust=trust) as port:
        async with port.caller(SpiffeId("old.local", CALLER.path)) as peer:
            await opened(peer, target)
        assert (await port.line())["identity"] == "spiffe://old.local/ns/demo/sa/client"

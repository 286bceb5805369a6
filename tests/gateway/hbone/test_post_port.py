"""Members of the mesh that come to the HBONE port in POST tunnels; the h2 library is the front end, and the
member, whose TLS is Python's own."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from gateway.ports import mesh_connections
from shared.address import Address
from shared.errors import UnavailableError
from shared.net.http2.liveness import while_connected
from shared.tasks import running, spawn
from shared.trust.spiffe import SpiffeId
from tests.shared.http2.dialogue import LAST_OF_ALL, PREFACE, goaway, goaway_seen, settings
from tests.support import hbone_port
from tests.support.ambient_client import AmbientClient, CarriedTls, InStream
from tests.support.hbone_port import CALLER, GATEWAY, TRUST_DOMAIN, HbonePort, Mesh
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.revocation import put, revocation_list, serial_in
from tests.support.tcp_peer import TcpPeer, TcpServer

ANY = (Address("127.0.0.1", 0),)
PATH = b"/_hbone/15008"
STRANGER = SpiffeId.of_workload(TRUST_DOMAIN, "other", "stranger")
BIG = os.urandom(3 << 20)


def post_port(port: HbonePort) -> int:
    return port.listener.post_addresses[0].port


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[HbonePort]:
    async with hbone_port.serving(tmp_path, tunnel_listen=ANY) as port:
        yield port


@pytest.fixture
async def front(port: HbonePort) -> AsyncIterator[Http2Peer]:
    """The front end's connection."""
    async with Http2Peer.connected(post_port(port)) as peer:
        yield peer


async def posted(front: Http2Peer) -> InStream:
    """A tunnel, in which nothing has been said."""
    stream = front.request(b"POST", PATH)
    assert await stream.status() == 200
    return InStream(stream)


@asynccontextmanager
async def member(
    port: HbonePort, front: Http2Peer, identity: SpiffeId = CALLER
) -> AsyncIterator[AmbientClient]:
    """A member's connection in a tunnel of its own."""
    tls = port.mesh.tls(port.mesh.member(identity))
    async with AmbientClient.inside(await posted(front), tls) as client:
        yield client


async def opened(client: AmbientClient, target: TcpServer) -> tuple[PeerStream, TcpPeer]:
    """Both ends of an open tunnel of the member's."""
    stream = client.connect(f"127.0.0.1:{target.port}")
    there = await target.accept()
    assert await stream.status() == 200
    return stream, there


async def test_a_member_from_its_post_to_its_line(
    port: HbonePort, front: Http2Peer, target: TcpServer
) -> None:
    async with member(port, front) as client:
        stream, there = await opened(client, target)
        assert port.value("hbone_listener_connections_open") == 1
        assert port.value("hbone_listener_front_end_connections_open") == 1
        await stream.send(b"ping")
        assert await there.read(4) == b"ping"
        stream.end()
        assert await there.rest() == b""
        await there.send(b"after the end")
        there.end()
        assert await stream.rest() == b"after the end"
        line = await port.line()
        assert (line["identity"], line["status"], line["flags"]) == (str(CALLER), 200, "-")
        assert line["src.addr"] == front.local_address  # the front end's
    await port.until(0)


async def test_three_mebibytes_both_ways_at_once(
    port: HbonePort, front: Http2Peer, target: TcpServer
) -> None:
    async with member(port, front) as client:
        stream, there = await opened(client, target)
        sending = spawn(stream.send(BIG), name="there")
        sending_back = spawn(there.send(BIG), name="back")
        assert await there.read(len(BIG)) == BIG
        assert await stream.read(len(BIG)) == BIG
        await asyncio.gather(sending, sending_back)


async def test_one_that_does_not_read_stops_nobody(
    port: HbonePort, front: Http2Peer, target: TcpServer
) -> None:
    """Neither way: a target that does not read, and a stream whose window stays closed."""
    async with member(port, front) as client:
        slow, stalled = await opened(client, target)
        slow.window_held = True
        filled = await slow.fill()
        assert filled >= 1 << 20
        sending_back = spawn(stalled.send(BIG), name="back")
        stream, there = await opened(client, target)
        sending = spawn(stream.send(BIG), name="there")
        assert await there.read(len(BIG)) == BIG
        await sending
        await there.send(BIG)
        assert await stream.read(len(BIG)) == BIG
        slow.release_window()
        assert await stalled.read(filled) == bytes(filled)
        assert await slow.read(len(BIG)) == BIG
        await sending_back


async def test_members_of_one_front_end_end_by_themselves(
    port: HbonePort, front: Http2Peer, target: TcpServer
) -> None:
    async with member(port, front) as one:
        stream, there = await opened(one, target)
        async with member(port, front, STRANGER) as other:
            refused = other.connect(f"127.0.0.1:{target.port}")
            assert await refused.status() == 401
            line = await port.line()
            assert (line["identity"], line["flags"]) == (str(STRANGER), "DENY")
        await port.until(1)
        await stream.send(b"still there")
        assert await there.read(11) == b"still there"


async def test_a_post_that_breaks_breaks_its_tunnels(
    port: HbonePort, front: Http2Peer, target: TcpServer
) -> None:
    tls = port.mesh.tls(port.mesh.member(CALLER))
    carrier = await posted(front)
    async with AmbientClient.inside(carrier, tls) as client:
        _, there = await opened(client, target)
        carrier.reset()
        assert await there.was_reset()
        assert (await port.line())["flags"] == "DOWNSTREAM_RESET"
    await port.until(0)


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        (b"GET", PATH, 405, "a tunnel is opened with POST"),
        (b"POST", b"/", 404, "no such tunnel: members of the mesh come by POST to /_hbone/15008"),
        (b"POST", b"/_hbone/15003", 404, "no such tunnel: members of the mesh come by POST to /_hbone/15008"),
        (b"CONNECT", b"", 404, "no such tunnel: members of the mesh come by POST to /_hbone/15008"),
    ],
)
async def test_what_is_no_tunnel_is_told_so(
    port: HbonePort, front: Http2Peer, method: bytes, path: bytes, status: int, error: str
) -> None:
    stream = front.request(method, path)
    assert await stream.status() == status
    assert (await stream.rest()).decode().strip() == error
    line = await port.line()
    assert (line["status"], line["error"], line["src.addr"]) == (status, error, front.local_address)
    assert port.listener.open_connections == 0


async def test_a_front_end_of_http1_is_told_what_to_declare(
    port: HbonePort, caplog: pytest.LogCaptureFixture
) -> None:
    async with TcpPeer.connected(post_port(port)) as peer:
        await peer.send(b"POST /_hbone/15008 HTTP/1.1\r\nhost: hgate\r\ntransfer-encoding: chunked\r\n\r\n")
        head, _, body = (await peer.rest()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 505 ")
    assert b"appProtocol: kubernetes.io/h2c" in body
    assert caplog.messages[-1].startswith(f"HTTP/1.1 from {peer.address} on hbone.tunnel_listen: ")


async def test_what_is_no_tls_is_refused(port: HbonePort, front: Http2Peer) -> None:
    carrier = await posted(front)
    await carrier.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await port.line())["error"] == "tls handshake: http request"
    assert await carrier.stream.rest() == b""
    await port.until(0)


async def test_a_member_without_a_certificate_has_the_alert(port: HbonePort, front: Http2Peer) -> None:
    roots = ssl.create_default_context(cadata=port.mesh.authority.root_pem.decode())
    roots.check_hostname = False
    roots.set_alpn_protocols(["h2"])
    tls = CarriedTls(carrier := await posted(front), roots)
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
        await tls.shake()
        while data := await carrier.some():
            tls.feed(data)
    assert (await port.line())["error"] == "tls handshake: peer did not return a certificate"


async def test_a_member_without_http2_is_refused(port: HbonePort, front: Http2Peer) -> None:
    tls = port.mesh.tls(port.mesh.member(CALLER))
    tls.set_alpn_protocols(["http/1.1"])
    carrier = await posted(front)
    await CarriedTls(carrier, tls).shake()
    assert (await port.line())["error"] == "the client does not offer HTTP/2 (ALPN h2)"


@pytest.mark.parametrize("says", [b"", b"\x16\x03\x01"])
async def test_a_member_that_does_not_go_on_has_the_handshakes_time(tmp_path: Path, says: bytes) -> None:
    async with (
        hbone_port.serving(tmp_path, tunnel_listen=ANY, handshake_timeout_s=0.05) as port,
        Http2Peer.connected(post_port(port)) as front,
    ):
        carrier = await posted(front)
        if says:
            await carrier.send(says)
        assert (await port.line())["error"] == "tls handshake: not done within 0.05 s"
        await carrier.stream.broken()
        assert port.listener.open_connections == 0


async def test_a_member_that_has_vanished_is_given_up(
    port: HbonePort, front: Http2Peer, target: TcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its tunnels, however healthy the front end's own connection looks."""
    monkeypatch.setattr(mesh_connections, "IN_TUNNEL", while_connected(0.1))
    async with member(port, front) as client:
        _, there = await opened(client, target)
        front.pause()
        assert await there.was_reset()
        await port.until(0)
        front.resume()


async def test_a_fault_of_ours_costs_one_connection(
    port: HbonePort, front: Http2Peer, target: TcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does over TCP: else what comes would be kept, and nobody would read it."""

    def fault(_: object) -> None:
        faults.append("once")
        raise ZeroDivisionError

    faults: list[str] = []
    told: list[BaseException | None] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context.get("exception")))
    async with member(port, front) as well:
        stream, there = await opened(well, target)
        with monkeypatch.context() as patch:
            patch.setattr(port.listener, "_serve", fault)
            async with member(port, front) as client:
                client.connect("127.0.0.1:1")
                await port.until(1)
        assert (faults, [type(error) for error in told]) == (["once"], [ZeroDivisionError])
        await stream.send(b"still there")
        assert await there.read(11) == b"still there"
    loop.set_exception_handler(None)


async def test_places_are_counted_back(port: HbonePort, front: Http2Peer) -> None:
    sources = port.listener._connections.sources
    async with member(port, front):
        await port.until(1)
        assert sources["127.0.0.1"] == 1
    await port.until(0)
    carrier = await posted(front)
    await carrier.send(b"no TLS")
    await carrier.stream.rest()
    await port.until(0)
    assert sources["127.0.0.1"] == 0


async def test_one_connection_too_many_is_503(tmp_path: Path) -> None:
    """Whether it came by TCP or by POST."""
    async with (
        hbone_port.serving(tmp_path, tunnel_listen=ANY, max_connections=1) as port,
        port.caller(),
        Http2Peer.connected(post_port(port)) as front,
    ):
        await port.until(1)
        refused = front.request(b"POST", PATH)
        assert await refused.status() == 503
        line = await port.line()
        assert (line["flags"], line["status"]) == ("LIMIT", 503)
        assert line["error"] == "1 connections are open, which is max_connections"
        async with TcpPeer.connected(post_port(port)) as second:
            assert await second.was_reset()
        assert "1 connections of front ends are open" in (await port.line())["error"]


async def test_one_from_a_front_end_too_many(tmp_path: Path) -> None:
    async with (
        hbone_port.serving(tmp_path, tunnel_listen=ANY, max_connections_per_source=1) as port,
        Http2Peer.connected(post_port(port)) as front,
        member(port, front),
    ):
        assert await front.request(b"POST", PATH).status() == 503
        assert "from 127.0.0.1 are open, which is max_connections_per_source" in (await port.line())["error"]


async def test_a_member_that_is_revoked_later_loses_all(tmp_path: Path, target: TcpServer) -> None:
    crl = tmp_path / "crl.pem"
    async with (
        hbone_port.serving(tmp_path, tunnel_listen=ANY, crl=crl, lists=()) as port,
        Http2Peer.connected(post_port(port)) as front,
        member(port, front) as client,
    ):
        _, there = await opened(client, target)
        put(crl, revocation_list(port.mesh.authority, serial_in(port.mesh.folder_of(CALLER))))
        assert port.listener.revocations is not None
        await port.listener.revocations.check_files()
        assert await there.was_reset()
        assert "revoked" in (await port.line())["error"]
        await port.until(0)


async def test_a_drain_lets_tunnels_finish(port: HbonePort, front: Http2Peer, target: TcpServer) -> None:
    async with member(port, front) as client:
        stream, there = await opened(client, target)
        where = post_port(port)
        front.pause()
        await port.listener.drain()
        late = front.request(b"POST", PATH)  # of a front end that has not seen GOAWAY yet
        front.resume()
        assert await late.status() == 503
        await client.peer.until(lambda: client.peer.goaway)
        await front.until(lambda: front.goaway)
        assert await late.rest() == b"the gateway is ending\n"
        with pytest.raises(OSError):
            await TcpPeer.connect(where)
        assert port.listener.unfinished
        await stream.send(b"last words")
        stream.end()
        assert await there.rest() == b"last words"
        there.end()
        assert await stream.rest() == b""
        await client.peer.until(lambda: client.peer.lost)
        await front.until(lambda: front.lost)
    assert not port.listener.unfinished


async def test_a_drain_in_the_middle_of_a_handshake(port: HbonePort, front: Http2Peer) -> None:
    carrier = await posted(front)
    await port.listener.drain()
    async with AmbientClient.inside(carrier, port.mesh.tls(port.mesh.member(CALLER))) as client:
        await client.peer.until(lambda: client.peer.goaway)


async def test_a_drain_before_a_front_end_has_spoken(port: HbonePort) -> None:
    """What it asks for at once is answered, and it is drained like others."""
    async with TcpPeer.connected(post_port(port)) as peer:
        while not port.listener.unfinished:  # noqa: ASYNC110  # it is accepted in its own time
            await asyncio.sleep(0)
        await port.listener.drain()
        await peer.send(PREFACE + settings())
        await peer.read_until(goaway(LAST_OF_ALL))
        await peer.send(goaway_seen())
        await peer.rest()
    while port.listener.unfinished:  # noqa: ASYNC110  # it sees our end in its own time
        await asyncio.sleep(0)


async def test_the_end_breaks_everything_off(tmp_path: Path, target: TcpServer) -> None:
    async with AsyncExitStack() as block:
        port = await block.enter_async_context(hbone_port.serving(tmp_path, tunnel_listen=ANY))
        front = await block.enter_async_context(Http2Peer.connected(post_port(port)))
        client = await block.enter_async_context(member(port, front))
        _, there = await opened(client, target)
        await posted(front)  # in the middle of its handshake
        before = running()
        await port.listener.close()
        assert await there.was_reset()
        await front.until(lambda: front.lost)
        assert running() < before


async def test_a_port_that_is_taken_says_so(tmp_path: Path, target: TcpServer) -> None:
    taken = (Address("127.0.0.1", target.port),)
    with pytest.raises(UnavailableError, match="hbone tunnels: cannot listen on"):
        async with hbone_port.serving(tmp_path, tunnel_listen=taken):
            pass


async def test_a_folder_of_another_mesh_is_not_let_in(tmp_path: Path, front: Http2Peer) -> None:
    other = Mesh(tmp_path / "other")
    carrier = await posted(front)
    with pytest.raises(ssl.SSLError, match=r"verify failed|UNKNOWN_CA"):
        await CarriedTls(carrier, other.tls(other.member(GATEWAY))).shake()

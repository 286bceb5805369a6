"""Ports that krun listens on for others. Both HTTP/2 connections' far ends are played by the h2 library."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import h2.config
import h2.connection
import h2.events
import pytest

from agent.config.port_range import PortRange
from agent.config.settings import Settings
from shared.address import MAX_PORT, Address
from shared.errors import Flag
from shared.http2.frames import CANCEL
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.krun_port import KrunPort
from tests.support.network import free_port
from tests.support.tcp_peer import TcpPeer

PREFACE_BYTES = 24
FRAME_HEAD_BYTES = 9


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
async def krun(port: int) -> AsyncIterator[KrunPort]:
    async with KrunPort.serving(Settings(remote_ports=(PortRange(port, port),), max_tunnels=3)) as krun:
        yield krun


@pytest.fixture
async def peer(krun: KrunPort) -> AsyncIterator[Http2Peer]:
    async with Http2Peer.connected(krun.port) as peer:
        yield peer


class Nested:
    """The server in a stream's bytes, which krun is a client of."""

    def __init__(self, stream: PeerStream) -> None:
        self.stream = stream
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self._events: list[h2.events.Event] = []

    @classmethod
    async def begun(cls, stream: PeerStream) -> Nested:
        assert await stream.status() == 200
        nested = cls(stream)
        nested._h2.initiate_connection()
        await nested.send()
        nested._take(await stream.read(PREFACE_BYTES))
        return nested

    async def send(self) -> None:
        await self.stream.send(self._h2.data_to_send())

    async def event(self, kind: type[h2.events.Event]) -> h2.events.Event:
        """The next event of `kind`, others dropped."""
        while True:
            while self._events:
                event = self._events.pop(0)
                if type(event) is kind:
                    return event
            head = await self.stream.read(FRAME_HEAD_BYTES)
            size = int.from_bytes(head[:3], "big")
            self._take(head + (await self.stream.read(size) if size else b""))
            await self.send()

    async def accepted(self) -> int:
        """The stream of the next connection that krun has accepted."""
        event = await self.event(h2.events.RequestReceived)
        assert isinstance(event, h2.events.RequestReceived)
        return event.stream_id

    async def answer(self, number: int, status: int) -> None:
        self._h2.send_headers(number, [(":status", str(status))], end_stream=status != 200)
        await self.send()

    async def data(self, number: int, data: bytes) -> None:
        self._h2.send_data(number, data)
        await self.send()

    def _take(self, data: bytes) -> None:
        self._events += self._h2.receive_data(data)


def listen(peer: Http2Peer, port: int, method: bytes = b"POST") -> PeerStream:
    return peer.request(method, b"/_hbone/listen/%d" % port)


async def test_a_connection_to_the_port(krun: KrunPort, peer: Http2Peer, port: int) -> None:
    stream = listen(peer, port)
    nested = await Nested.begun(stream)
    async with TcpPeer.connected(port) as client:
        number = await nested.accepted()
        await client.send(b"ping")
        await nested.answer(number, 200)
        event = await nested.event(h2.events.DataReceived)
        assert isinstance(event, h2.events.DataReceived)
        assert event.data == b"ping"
        await nested.data(number, b"pong")
        assert await client.read(4) == b"pong"
        stream.reset(CANCEL)
        assert await client.was_reset()
    records = [await krun.record(), await krun.record()]
    assert {record.name for record in records} == {f"listen/{port}", f"accepted/{port}"}
    (accepted,) = [record for record in records if record.name == f"accepted/{port}"]
    assert (accepted.sent_bytes, accepted.received_bytes, accepted.opened) == (4, 4, True)


async def test_the_port_is_free_when_the_stream_is_over(krun: KrunPort, peer: Http2Peer, port: int) -> None:
    first = listen(peer, port)
    await Nested.begun(first)
    second = listen(peer, port)
    assert await second.status() == 409
    text = b"cannot listen on 127.0.0.1:%d: the port is in use by another hbone forward\n" % port
    assert await second.rest() == text
    assert (await krun.record()).flag is Flag.CONNECT
    first.reset(CANCEL)
    assert (await krun.record()).name == f"listen/{port}"
    await Nested.begun(listen(peer, port))


async def test_a_port_that_somebody_else_has(peer: Http2Peer, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        stream = listen(peer, port)
        assert await stream.status() == 409
        assert await stream.rest() == b"cannot listen on 127.0.0.1:%d: the port is in use\n" % port


@pytest.mark.parametrize("text", [b"0", b"65536", b"abc", b"", b"080", b"80/x"])
async def test_what_is_no_port(peer: Http2Peer, text: bytes) -> None:
    stream = peer.request(b"POST", b"/_hbone/listen/" + text)
    assert await stream.status() == 404


async def test_a_port_that_is_not_allowed(krun: KrunPort, peer: Http2Peer, port: int) -> None:
    stream = listen(peer, port - 1)
    assert await stream.status() == 403
    wanted = f"port {port - 1} may not be listened on: HBONE_REMOTE_PORTS of krun allows {port}\n"
    assert await stream.rest() == wanted.encode()
    assert (await krun.record()).flag is Flag.DENY


async def test_no_port_that_others_are_led_to(port: int) -> None:
    """The app may start later, and an sshd not at all: whoever had its port would get what is sent there."""
    target, allowed = Address("127.0.0.1", port), (PortRange(1, MAX_PORT),)
    for own in (
        Settings(app=target, remote_ports=allowed),
        Settings(sshd=target, remote_ports=allowed),
        Settings(targets={"DB": target}, remote_ports=allowed),
    ):
        async with KrunPort.serving(own) as krun, Http2Peer.connected(krun.port) as peer:
            stream = listen(peer, port)
            assert await stream.status() == 403
            assert await stream.rest() == (
                f"port {port} may not be listened on: what comes to krun for others is led there\n".encode()
            )


async def test_only_post(peer: Http2Peer, port: int) -> None:
    assert await listen(peer, port, b"GET").status() == 405


async def test_a_connection_that_the_far_side_refuses(krun: KrunPort, peer: Http2Peer, port: int) -> None:
    nested = await Nested.begun(listen(peer, port))
    async with TcpPeer.connected(port) as client:
        await nested.answer(await nested.accepted(), 503)
        assert await client.was_reset()
    record = await krun.record()
    assert (record.name, record.status, record.opened) == (f"accepted/{port}", 503, False)


async def test_connections_count_as_tunnels(peer: Http2Peer, port: int) -> None:
    """Three are allowed, of which the stream that listens is one."""
    nested = await Nested.begun(listen(peer, port))
    async with TcpPeer.connected(port), TcpPeer.connected(port):
        await nested.accepted()
        await nested.accepted()
        async with TcpPeer.connected(port) as third:
            assert await third.was_reset()


async def test_a_drain_ends_it(krun: KrunPort, peer: Http2Peer, port: int) -> None:
    stream = listen(peer, port)
    nested = await Nested.begun(stream)
    krun.requests.drain()
    await nested.event(h2.events.ConnectionTerminated)
    with pytest.raises(OSError):
        await TcpPeer.connect(port)
    assert await stream.rest() == b""
    record = await krun.record()
    assert (record.name, record.error) == (f"listen/{port}", None)


async def test_a_peer_that_speaks_no_http2(krun: KrunPort, peer: Http2Peer, port: int) -> None:
    stream = listen(peer, port)
    assert await stream.status() == 200
    await stream.send(b"SSH-2.0-surprise\r\n" * 10)
    record = await krun.record()
    assert record.name == f"listen/{port}"
    with pytest.raises(OSError):
        await TcpPeer.connect(port)


async def test_a_far_side_that_is_gone_loses_the_port(
    krun: KrunPort, peer: Http2Peer, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front end may hold its stream for an hour."""
    monkeypatch.setattr("agent.tunnels.remote_ports.LIFE_S", 0.1)
    await Nested.begun(listen(peer, port))  # which answers nothing from here on
    record = await krun.record()
    assert record.name == f"listen/{port}"
    assert "has not answered PING within 0.1 s" in str(record.error)
    monkeypatch.undo()
    await Nested.begun(listen(peer, port))

"""What the tests of legs and connections stand on: bare TCP peers, and a whole tunnel on loopback.

    client → TcpLeg → Relay → client Connection → h2c → server Connection → Relay → TcpLeg → app

Client and app are bare sockets, so that a test decides when FIN and RST are sent and sees which of them came.
Every wait has a deadline that only a failing test reaches.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from shared.address import Address
from shared.errors import DialError
from shared.http2.session import SessionLimits
from shared.listen import bound_address, listen
from shared.net.dial import Origin, dial, dial_http2
from shared.net.http2.connection import Connection
from shared.net.legs.stream import Stream
from shared.net.legs.tcp import TcpLeg
from shared.net.legs.tcp_end import RESET_ON_CLOSE
from shared.net.pool.pool import Pool
from shared.net.pool.pool_limits import PoolLimits
from shared.net.relay.relay import Relay
from shared.net.tls.contexts import server_context
from shared.tasks import spawn
from shared.tunnel import tunnel_request

PATIENCE_S = 20
"""Longer than anything on loopback takes, even on a busy machine; reached only by a test that fails."""

ACKNOWLEDGED_S = 0.05
"""After which the kernel has acknowledged what it has room for: RST then destroys nothing."""

READ_BYTES = 1 << 16
UNREAD_MIB = 32
"""More than both kernel buffers of a loopback connection hold."""

FIN = "FIN"
RST = "RST"


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop turn until `condition` holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await turn()


async def turn() -> None:
    """One turn of the loop."""
    await asyncio.sleep(0)


async def turns(count: int) -> None:
    """So many of them."""
    for _ in range(count):
        await turn()


class Peer:
    """One end of a TCP connection, ours to play."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.received = bytearray()
        self.end = ""
        """FIN or RST, once it came."""
        self._loop = asyncio.get_running_loop()
        self._reading: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(cls, port: int, prepare: Callable[[socket.socket], None] = lambda sock: None) -> Peer:
        sock = socket.socket()
        sock.setblocking(False)
        prepare(sock)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return cls(sock)

    def start_reading(self) -> None:
        """Takes whatever comes from now on."""
        self._reading = spawn(self._read(), name="peer reads")

    async def ended(self) -> str:
        """How the other end ended, once it has."""
        if self._reading is None:
            self.start_reading()
        await until(lambda: bool(self.end))
        return self.end

    async def read(self, count: int) -> bytes:
        """The next `count` bytes."""
        if self._reading is None:
            self.start_reading()
        await until(lambda: len(self.received) >= count or bool(self.end))
        taken = bytes(self.received[:count])
        del self.received[:count]
        return taken

    async def send(self, data: bytes) -> None:
        """Sends `data` as fast as it is taken."""
        async with asyncio.timeout(PATIENCE_S):
            await self._loop.sock_sendall(self.sock, data)

    def send_soon(self, data: bytes) -> None:
        """The same, while the test goes on; a connection that breaks meanwhile is no failure."""
        self._sending.add(spawn(self._send_soon(data), name="peer sends"))

    async def all_sent(self) -> None:
        """Returns when everything given to `send_soon` has been taken."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*self._sending)

    @property
    def is_sending(self) -> bool:
        """Whether something given to `send_soon` has not been taken."""
        return not all(task.done() for task in self._sending)

    def fin(self) -> None:
        """Sends FIN."""
        self.sock.shutdown(socket.SHUT_WR)

    async def rst(self) -> None:
        """Sends RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        await self.close()

    async def close(self) -> None:
        """Closes the socket, whatever is under way."""
        for task in (self._reading, *self._sending):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._sending.clear()
        self.sock.close()

    async def _read(self) -> None:
        try:
            while data := await self._loop.sock_recv(self.sock, READ_BYTES):
                self.received += data
        except OSError:
            self.end = RST
        else:
            self.end = FIN

    async def _send_soon(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            await self._loop.sock_sendall(self.sock, data)


class App:
    """A listening socket whose connections are played one by one."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.port = int(self.listener.getsockname()[1])
        self._peers: list[Peer] = []

    async def accept(self) -> Peer:
        """The next connection."""
        async with asyncio.timeout(PATIENCE_S):
            sock, _ = await asyncio.get_running_loop().sock_accept(self.listener)
        peer = Peer(sock)
        self._peers.append(peer)
        return peer

    async def close(self) -> None:
        for peer in self._peers:
            await peer.close()
        self.listener.close()


@asynccontextmanager
async def dialled() -> AsyncIterator[tuple[TcpLeg, Peer]]:
    """A leg and its peer."""
    app = App()
    leg = await dial(Address("127.0.0.1", app.port), PATIENCE_S)
    try:
        yield leg, await app.accept()
    finally:
        leg.abort()
        await app.close()
        await until(lambda: leg._transport.is_closing())
        await asyncio.sleep(0)


@asynccontextmanager
async def connected(origin: Origin) -> AsyncIterator[Connection]:
    """An HTTP/2 connection to `origin`."""
    lost = asyncio.Event()
    connection = await dial_http2(
        origin, PATIENCE_S, lambda: Connection(client=True, on_lost=lambda _: lost.set())
    )
    try:
        yield connection
    finally:
        connection.close()
        await lost.wait()


async def not_connected(origin: Origin, timeout_s: float = PATIENCE_S) -> str:
    """Why there is no HTTP/2 connection to `origin`."""
    with pytest.raises(DialError) as caught:
        await dial_http2(origin, timeout_s, lambda: Connection(client=True))
    connect, _, cause = str(caught.value).partition(f"{origin}: ")
    assert connect == "connect to "
    return cause


class _Accepted(asyncio.Protocol):
    """Makes a TCP leg for a connection, and says so."""

    def __init__(self, made: Callable[[TcpLeg], None]) -> None:
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        leg = TcpLeg()
        cast("asyncio.Transport", transport).set_protocol(leg)
        leg.connection_made(transport)
        self._made(leg)


class World:
    """The tunnel of the module's drawing, in one process."""

    def __init__(self, server_limits: SessionLimits | None) -> None:
        self.app = App()
        self.port = 0
        """Where clients connect."""
        self.connections: list[Connection] = []
        """The servers' ends."""
        self.pool = Pool(limits=PoolLimits(connect_timeout_s=PATIENCE_S, streams_per_connection=100))
        self.gateway_relays: list[Relay] = []
        self.agent_relays: list[Relay] = []
        self._server_limits = server_limits
        self._buffer_bytes: int | None = None
        self._clients: list[Peer] = []
        self._listeners: list[asyncio.Server] = []
        self._origin: Origin | None = None

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        *,
        service: int | None = None,
        server_limits: SessionLimits | None = None,
        tls: tuple[Path, Path, Path] | None = None,
        buffer_bytes: int | None = None,
    ) -> AsyncIterator[World]:
        """With `service` tunnels go to that port instead of the agent. `tls` is the agent's certificate, its
        key, and the CA to trust. `buffer_bytes` is what the kernel is to hold of what goes to client and
        app, on either side: by itself it holds megabytes, and nobody ever has to wait."""
        world = cls(server_limits)
        world._buffer_bytes = buffer_bytes
        anywhere = Address("127.0.0.1", 0)
        context = server_context(*tls[:2]) if tls else None
        agent = await listen(anywhere, world._accept_connection, purpose="tunnels", tls=context)
        gateway = await listen(anywhere, lambda: _Accepted(world._accept_client), purpose="clients")
        world._listeners = [agent, gateway]
        world._limit(gateway.sockets[0], socket.SO_SNDBUF)  # what is accepted inherits it
        world._limit(world.app.listener, socket.SO_RCVBUF)
        address = bound_address(agent) if service is None else Address("127.0.0.1", service)
        world._origin = (
            Origin("https", "localhost", address, tls[2]) if tls else Origin("http", "agent", address)
        )
        world.port = bound_address(gateway).port
        try:
            yield world
        finally:
            await world._close()

    async def tunnel(self) -> tuple[Peer, Peer]:
        """A client and the app's end of its tunnel."""
        client = await self.client()
        return client, await self.app.accept()

    async def client(self) -> Peer:
        """A client whose tunnel is yet to be opened."""
        client = await Peer.connect(self.port, lambda sock: self._limit(sock, socket.SO_RCVBUF))
        self._clients.append(client)
        return client

    async def over(self) -> None:
        """Returns when every relay is over and no stream is left."""
        await until(lambda: all(relay.over for relay in self.gateway_relays + self.agent_relays))
        await until(lambda: not any(end.session.streams for end in self.ends))

    @property
    def ends(self) -> list[Connection]:
        """Both ends of all connections."""
        clients = [end for pool in self.pool.origins.values() for end in pool.connections]
        return self.connections + clients

    async def _close(self) -> None:
        for listener in self._listeners:
            listener.close()
        for client in self._clients:
            await client.close()
        await self.app.close()
        for end in self.ends:
            end.abort("the test is over")
        await until(lambda: not self.pool.origins and not self.connections)
        relays = self.gateway_relays + self.agent_relays
        await until(lambda: all(relay.over for relay in relays))
        legs = [leg for relay in relays for leg in (relay.downstream, relay.upstream)]
        await until(lambda: all(leg._transport.is_closing() for leg in legs if isinstance(leg, TcpLeg)))
        await turn()  # for the transports of the last legs

    def _limit(self, sock: socket.socket, option: int) -> None:
        if self._buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, option, self._buffer_bytes)

    # The gateway.

    def _accept_client(self, leg: TcpLeg) -> None:
        spawn(self._to_agent(leg), name="gateway")

    async def _to_agent(self, leg: TcpLeg) -> None:
        assert self._origin is not None
        headers = tunnel_request.post("http", "agent", "/_hbone/15003")
        stream = await self.pool.of(self._origin).open(headers, PATIENCE_S)
        assert await stream.response(PATIENCE_S) == 200
        self.gateway_relays.append(Relay(leg, stream, lambda _: None))
        self.gateway_relays[-1].start()

    # The agent.

    def _accept_connection(self) -> Connection:
        connection = Connection(
            client=False,
            limits=self._server_limits,
            on_request=self._take,
            on_lost=self.connections.remove,
        )
        self.connections.append(connection)
        return connection

    def _take(self, stream: Stream) -> None:
        spawn(self._to_app(stream), name="agent")

    async def _to_app(self, stream: Stream) -> None:
        leg = await dial(Address("127.0.0.1", self.app.port), PATIENCE_S)
        self._limit(leg._transport.get_extra_info("socket"), socket.SO_SNDBUF)
        stream.respond([(b":status", b"200")])
        self.agent_relays.append(Relay(stream, leg, lambda _: None))
        self.agent_relays[-1].start()

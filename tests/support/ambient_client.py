"""A client of the ambient mesh, as ztunnel is on the wire: HBONE, and HBONE in HBONE.

TLS 1.3 without SNI, ALPN h2, ztunnel's SETTINGS, windows and headers (as measured of a real one). HTTP/2 is
the h2 library's and TLS Python's own, so it shares no code with what it is tried on.

    async with AmbientClient.inside(InStream(post), mesh.tls(folder)) as client:     # in a tunnel, or
    async with AmbientClient.inside(InStream(outer.connect("hello...:80")), ...):    # in an outer CONNECT, or
    async with AmbientClient.inside(await OnSocket.to(port), ...) as client:         # on a TCP connection
        tunnel = client.connect("hello.demo.svc.cluster.local:80")
        assert await tunnel.status() == 200
        await tunnel.send(b"ping")
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from h2.exceptions import StreamClosedError
from h2.settings import SettingCodes

from shared.tasks import spawn
from tests.support.http2_peer import Fields, Http2Peer, PeerStream
from tests.support.tcp_peer import PATIENCE_S

SETTINGS = {
    SettingCodes.ENABLE_PUSH: 0,
    SettingCodes.INITIAL_WINDOW_SIZE: 4 << 20,
    SettingCodes.MAX_FRAME_SIZE: 1 << 20,
    SettingCodes.MAX_HEADER_LIST_SIZE: 16 << 10,
}
"""ztunnel's, beside the defaults of its library."""

CONNECTION_WINDOW_BYTES = 16 << 20
FIRST_WINDOW_BYTES = 65535

CLIENT = "10.4.0.7:41844"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CANCEL = 8

BAGGAGE = (
    b"k8s.cluster.name=Kubernetes,k8s.namespace.name=demo,k8s.deployment.name=client,service.name=client,"
    b"service.version=v1"
)


class Carrier(Protocol):
    """What carries a client's TLS."""

    async def send(self, data: bytes) -> None: ...

    async def some(self) -> bytes:
        """What has come; b"" at the end. Raises OSError."""

    def end(self) -> None: ...

    def reset(self) -> None: ...


class InStream:
    """A stream of HTTP/2 as the carrier: of a POST tunnel, or of an outer CONNECT."""

    def __init__(self, stream: PeerStream) -> None:
        self.stream = stream

    async def send(self, data: bytes) -> None:
        await self.stream.send(data)

    async def some(self) -> bytes:
        return await self.stream.some()

    def end(self) -> None:
        if not self.stream.peer.lost:
            with contextlib.suppress(StreamClosedError):
                self.stream.end()

    def reset(self) -> None:
        """As ztunnel ends its outer stream."""
        if not self.stream.peer.lost:
            with contextlib.suppress(StreamClosedError):
                self.stream.reset(CANCEL)


class OnSocket:
    """A TCP connection as the carrier."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def to(cls, port: int) -> OnSocket:
        """A connection to a loopback port."""
        async with asyncio.timeout(PATIENCE_S):
            return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def some(self) -> bytes:
        return await self._reader.read(64 << 10)

    def end(self) -> None:
        self._writer.write_eof()

    def reset(self) -> None:
        self._writer.transport.abort()


class CarriedTls(asyncio.Transport):
    """TLS over a carrier, as a transport; made by `over`. It ends with close_notify and then the carrier's
    end (`close`), or with the carrier's reset (`abort`)."""

    def __init__(self, carrier: Carrier, context: ssl.SSLContext) -> None:
        super().__init__()
        self.carrier = carrier
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing)  # no SNI
        self._unsent = bytearray()
        self._is_held = False
        self._closing = False
        self._wakes = asyncio.Event()
        self._rests = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.ended = asyncio.Event()
        """Nothing more comes."""
        self.error: Exception | None = None
        """Why, if it was no close_notify: an alert, a reset, or an end without a word."""

    async def shake(self) -> None:
        """The handshake. Raises ssl.SSLError with the server's alert, or OSError."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    self.tls.do_handshake()
                except ssl.SSLWantReadError:
                    await self._send_outgoing()
                    data = await self.carrier.some()
                    if not data:
                        raise ConnectionResetError("ended in the handshake") from None
                    self._incoming.write(data)
                else:
                    await self._send_outgoing()
                    return

    def feed(self, data: bytes) -> None:
        """Without `start`: takes what came. Raises ssl.SSLError for an alert."""
        self._incoming.write(data)
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            while self.tls.read(64 << 10):
                pass

    def start(self, protocol: asyncio.Protocol) -> None:
        """Gives `protocol` what comes from now on."""
        protocol.connection_made(self)
        self._tasks = [
            spawn(self._receive(protocol), name="ambient client receives"),
            spawn(self._send(), name="ambient client sends"),
        ]

    def hold(self) -> None:
        """From now on what is written is not sent."""
        self._is_held = True

    async def sent(self) -> None:
        """Returns when the carrier has everything that was written."""
        async with asyncio.timeout(PATIENCE_S):
            await self._rests.wait()

    def take_held(self) -> bytes:
        """What would have been sent since `hold`."""
        held = bytes(self._unsent)
        self._unsent.clear()
        return held

    async def stop(self) -> None:
        """Lets go of it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send_outgoing(self) -> None:
        if data := self._outgoing.read():
            await self.carrier.send(data)

    async def _receive(self, protocol: asyncio.Protocol) -> None:
        try:
            while not self._feed(protocol):
                data = await self.carrier.some()
                if not data:
                    raise ConnectionResetError("ended without close_notify")
                self._incoming.write(data)
        except OSError as error:  # ssl.SSLError is one
            self.error = error
        finally:
            self.ended.set()
            protocol.connection_lost(self.error)

    def _feed(self, protocol: asyncio.Protocol) -> bool:
        """Whether close_notify came."""
        try:
            while data := self.tls.read(64 << 10):
                protocol.data_received(data)
            return True
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLZeroReturnError:
            return True

    async def _send(self) -> None:
        with contextlib.suppress(ConnectionError, AssertionError):  # the receiver tells how it ended
            while True:
                while self._unsent:
                    data = bytes(self._unsent)
                    self._unsent.clear()
                    await self.carrier.send(data)
                if self._closing:
                    self.carrier.end()
                    return
                self._rests.set()
                self._wakes.clear()
                await self._wakes.wait()

    # asyncio.Transport.

    def write(self, data: Any) -> None:
        if data and not self._closing:
            self.tls.write(data)
            self._take()

    def _take(self) -> None:
        self._unsent += self._outgoing.read()
        self._rests.clear()
        if not self._is_held:
            self._wakes.set()

    def close(self) -> None:
        if not self._closing:
            with contextlib.suppress(ssl.SSLError):
                self.tls.unwrap()
            self._closing = True
            self._take()

    def abort(self) -> None:
        self._closing = True
        self.carrier.reset()

    def is_closing(self) -> bool:
        return self._closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.tls if name == "ssl_object" else default


class AmbientClient:
    """An HBONE connection, its TLS done; made by `inside`."""

    def __init__(self, transport: CarriedTls, peer: Http2Peer) -> None:
        self.transport = transport
        self.peer = peer
        """The HTTP/2 in it."""

    @classmethod
    @asynccontextmanager
    async def inside(cls, carrier: Carrier, tls: ssl.SSLContext) -> AsyncIterator[AmbientClient]:
        """A connection in `carrier` until the block ends, which aborts it. Raises what `CarriedTls.shake`
        does."""
        transport = CarriedTls(carrier, tls)
        await transport.shake()
        peer = Http2Peer(
            client=True, settings=SETTINGS, window_bytes=CONNECTION_WINDOW_BYTES - FIRST_WINDOW_BYTES
        )
        transport.start(peer)
        try:
            yield cls(transport, peer)
        finally:
            transport.abort()
            await transport.stop()

    def connect(self, authority: str, fields: Fields = (), *, network: str = "") -> PeerStream:
        """CONNECT with ztunnel's headers. In double HBONE the inner one names the `network`."""
        told = [
            (b"baggage", BAGGAGE),
            (b"forwarded", f'for="{CLIENT}"'.encode()),
            (b"traceparent", TRACE.encode()),
            *([(b"x-forwarded-network", network.encode())] if network else []),
        ]
        return self.peer.request(b"CONNECT", b"", [*told, *fields], authority=authority.encode())

    def close(self) -> None:
        """Ends the connection in order: close_notify."""
        self.transport.close()

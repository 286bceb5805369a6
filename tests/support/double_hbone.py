"""Double HBONE as a ztunnel speaks it to the east-west gateway of another network.

Outer connections are pooled, 100 tunnels each at most. A connection that has had as many is left to them, and
the next tunnel makes a new one, as ztunnel's pool does. In each outer CONNECT is a TLS connection of its own
with one CONNECT, and the end of a tunnel is RST_STREAM CANCEL of the outer stream. Every connection sends
PING every 10 s and wants an answer within 20 s.

    async with Ztunnel.of(gateway.port, tls) as ztunnel, ztunnel.tunnel("hello...:8080") as tunnel:
        await tunnel.stream.send(b"ping")
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from shared.tasks import spawn
from tests.support.ambient_client import AmbientClient, InStream, OnSocket
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.tcp_peer import PATIENCE_S

MAX_TUNNELS = 100
"""Of an outer connection (ztunnel's POOL_MAX_STREAMS_PER_CONNECTION)."""

PING_S = 10.0
PING_TIMEOUT_S = 20.0

NETWORK = "hgate"
"""Where the service is, as its inner CONNECTs say."""


class ConnectRefusedError(Exception):
    """A CONNECT had another answer than 200."""

    def __init__(self, status: int, text: str, *, inner: bool) -> None:
        super().__init__(f"{'inner' if inner else 'outer'} {status}: {text}")
        self.status = status
        self.text = text
        self.inner = inner
        """krun's answer, not the gateway's."""


@dataclass(frozen=True, slots=True)
class DoubleTunnel:
    """An open tunnel."""

    outer: PeerStream
    """The CONNECT to the gateway."""
    inner: AmbientClient
    """The connection in it."""
    stream: PeerStream
    """The CONNECT in that, which carries the bytes."""

    async def let_go(self) -> None:
        """Ends it as ztunnel does, as soon as everything written so far has been sent: RST_STREAM CANCEL,
        without another word in the inner connection."""
        await self.inner.transport.sent()
        self.inner.transport.abort()


class Ztunnel:
    """One member's outer connections to a gateway; made by `of`."""

    def __init__(self, port: int, tls: ssl.SSLContext, block: AsyncExitStack) -> None:
        self.outers: list[AmbientClient] = []
        """All that were made."""
        self.port = port
        self.tls = tls
        self._block = block
        self._room = 0
        self._making = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def of(cls, port: int, tls: ssl.SSLContext) -> AsyncIterator[Ztunnel]:
        """A member that shows and wants what `tls` has, outside and inside; its connections end in order with
        the block. `port` is a loopback port."""
        async with AsyncExitStack() as block:
            yield cls(port, tls, block)

    async def connect(self, authority: str) -> PeerStream:
        """An outer CONNECT, which the gateway has yet to answer."""
        async with self._making:  # one makes a connection, the others wait for it
            if not self._room:
                self.outers.append(await self._block.enter_async_context(self._outer()))
                self._room = MAX_TUNNELS
            self._room -= 1
            return self.outers[-1].connect(authority)

    @asynccontextmanager
    async def tunnel(self, authority: str) -> AsyncIterator[DoubleTunnel]:
        """A tunnel to `authority`, let go at the end of the block.

        Raises:
            ConnectRefusedError: either of the two said no.
            OSError: the inner handshake failed.
        """
        outer = await self.connect(authority)
        await _accepted(outer, inner=False)
        async with AmbientClient.inside(InStream(outer), self.tls) as inner, _pinging(inner.peer):
            stream = inner.connect(authority, network=NETWORK)
            await _accepted(stream, inner=True)
            yield DoubleTunnel(outer, inner, stream)

    @asynccontextmanager
    async def _outer(self) -> AsyncIterator[AmbientClient]:
        carrier = await OnSocket.to(self.port)
        async with AmbientClient.inside(carrier, self.tls) as outer, _pinging(outer.peer):
            yield outer
            outer.peer.say_goaway(0)
            outer.close()
            async with asyncio.timeout(PATIENCE_S):
                await outer.transport.ended.wait()


async def _accepted(stream: PeerStream, *, inner: bool) -> None:
    status = await stream.status()
    if status != 200:
        raise ConnectRefusedError(status, (await stream.rest()).decode(), inner=inner)


@asynccontextmanager
async def _pinging(peer: Http2Peer) -> AsyncIterator[None]:
    task = spawn(_ping(peer), name="ztunnel's pings")
    try:
        yield
    finally:
        task.cancel()


async def _ping(peer: Http2Peer) -> None:
    while not peer.lost:
        await asyncio.sleep(PING_S)  # what ztunnel does, not a wait for something
        async with asyncio.timeout(PING_TIMEOUT_S):
            await peer.answered()

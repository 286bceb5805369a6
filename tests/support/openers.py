"""Clients that open tunnels one after the other, all at once, and ask for each of them exactly once.

They share HTTP/2 connections as ztunnel does: one that the other end has said GOAWAY on gets no new stream,
and a new connection is made in its place. A tunnel whose request was sent has to be served; one that is
refused or broken off is not asked for again, but counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from shared.tasks import spawn
from tests.support.http2_peer import Http2Peer, PeerStream
from tests.support.tcp_peer import PATIENCE_S

STREAMS = 100
"""On one connection, as ztunnel has it."""

WORD = b"are you there?"


class Openers:
    """Made by `opening`."""

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[Http2Peer]],
        request: Callable[[Http2Peer], PeerStream],
        *,
        may_connect: bool,
    ) -> None:
        self.served = 0
        """Tunnels that were opened, gave back each word, and ended in order."""
        self.broken: list[str] = []
        """What became of the others."""
        self.connections = 0
        self._connect = connect
        self._request = request
        self._may_connect = may_connect
        self._peers = AsyncExitStack()
        self._peer: Http2Peer | None = None
        self._open = 0
        self._dialling = asyncio.Lock()
        self._stopping = False
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def until_served(self, count: int) -> None:
        """Returns when so many more tunnels have been served."""
        wanted = self.served + count
        async with asyncio.timeout(PATIENCE_S):
            while self.served < wanted and not self.broken:
                self._changed.clear()
                await self._changed.wait()
        assert self.served >= wanted, f"only {self.served}; broken: {self.broken}"

    async def stop(self) -> None:
        """Opens no more, and returns when those that are open have ended."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _run(self, words: int) -> None:
        """One client, whose tunnels say so many words: so not all clients open theirs at the same moment."""
        while not self._stopping:
            peer = await self._usable()
            if peer is None:
                return
            stream = self._request(peer)
            try:
                assert await stream.status() == 200, f"answered {dict(stream.fields)}"
                for _ in range(words):
                    await stream.send(WORD)
                    assert await stream.read(len(WORD)) == WORD
                stream.end()
                assert await stream.rest() == b""
            except (AssertionError, TimeoutError, OSError) as error:
                self.broken.append(f"{stream}: {error!r}")
            else:
                self.served += 1
            self._changed.set()

    async def _usable(self) -> Http2Peer | None:
        async with self._dialling:
            if self._peer is None or self._peer.goaway or self._peer.lost:
                if self._peer is not None and not self._may_connect:
                    return None
                self.connections += 1
                self._peer = await self._peers.enter_async_context(self._connect())
            return self._peer


@asynccontextmanager
async def opening(
    count: int,
    connect: Callable[[], AbstractAsyncContextManager[Http2Peer]],
    request: Callable[[Http2Peer], PeerStream],
    *,
    may_connect: bool = True,
) -> AsyncIterator[Openers]:
    """`count` clients that open tunnels until the block ends, over connections of `connect`, each by a
    request that `request` sends. Without `may_connect` they end with their first connection."""
    assert count <= STREAMS
    openers = Openers(connect, request, may_connect=may_connect)
    openers._tasks = [spawn(openers._run(1 + number % 5), name=f"opener {number}") for number in range(count)]
    try:
        yield openers
        await openers.stop()
    finally:
        for task in openers._tasks:
            task.cancel()
        await asyncio.gather(*openers._tasks, return_exceptions=True)
        await openers._peers.aclose()

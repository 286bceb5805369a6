"""The other end of a TCP connection, played step by step: a client of the gateway, a target of krun, an app.

Counterpart of `http2_peer.py`. Every wait has a deadline that only a failing test reaches.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import cast

from shared.net.legs.tcp import address_text
from shared.net.legs.tcp_end import reset

PATIENCE_S = 20
"""Longer than anything on loopback takes, even on a busy machine; reached only by a test that fails."""

BACKLOG = 1024
"""More than any test connects at once."""


class TcpPeer:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.address = address_text(writer.get_extra_info("sockname"))
        """Our end as HOST:PORT: what the other end logs."""
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, port: int) -> TcpPeer:
        """Connects to a loopback port."""
        async with asyncio.timeout(PATIENCE_S):
            return cls(*await asyncio.open_connection("127.0.0.1", port))

    @classmethod
    @asynccontextmanager
    async def connected(cls, port: int) -> AsyncIterator[TcpPeer]:
        """A connection to a loopback port, until the block ends."""
        peer = await cls.connect(port)
        try:
            yield peer
        finally:
            await peer.close()

    # What goes out.

    async def send(self, data: bytes) -> None:
        """Sends `data`, and waits while the other end does not read."""
        self._writer.write(data)
        async with asyncio.timeout(PATIENCE_S):
            await self._writer.drain()

    def send_soon(self, data: bytes) -> None:
        """Sends `data` as the other end takes it."""
        self._writer.write(data)

    def end(self) -> None:
        """Sends FIN: nothing more will be sent."""
        self._writer.write_eof()

    def reset(self) -> None:
        """Sends RST."""
        reset(cast("asyncio.Transport", self._writer.transport))

    @property
    def unsent(self) -> int:
        """How many bytes the other end does not take."""
        return self._writer.transport.get_write_buffer_size()

    # What comes in.

    def pause(self) -> None:
        """Reads nothing any more, so the other end's bytes pile up."""
        cast("asyncio.Transport", self._writer.transport).pause_reading()

    def resume(self) -> None:
        """Undoes `pause`."""
        cast("asyncio.Transport", self._writer.transport).resume_reading()

    async def read(self, count: int) -> bytes:
        """Exactly `count` bytes."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.readexactly(count)

    async def read_until(self, end: bytes) -> bytes:
        """Everything up to `end`, which is included; 64 KiB at most."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.readuntil(end)

    async def rest(self) -> bytes:
        """Everything up to FIN. Raises ConnectionResetError if RST comes instead."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.read(-1)

    async def was_reset(self) -> bool:
        """Whether the other end sends RST instead of FIN."""
        try:
            await self.rest()
        except ConnectionResetError:
            return True
        return False

    async def close(self) -> None:
        """Lets go of the connection, unsent bytes included."""
        self._writer.transport.abort()
        with suppress(OSError):
            await self._writer.wait_closed()


class TcpServer:
    """A loopback port whose connections are played one by one."""

    def __init__(self) -> None:
        self.port = 0
        self._accepted: asyncio.Queue[TcpPeer] = asyncio.Queue()
        self._peers: list[TcpPeer] = []

    async def accept(self) -> TcpPeer:
        """The next connection."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._accepted.get()

    @property
    def count(self) -> int:
        """How many connections came so far."""
        return len(self._peers)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = TcpPeer(reader, writer)
        self._peers.append(peer)
        self._accepted.put_nowait(peer)

    @classmethod
    @asynccontextmanager
    async def listening(cls, port: int = 0) -> AsyncIterator[TcpServer]:
        """A server on `port`, 0 for any free one, until the block ends."""
        self = cls()
        # Beyond the backlog a kernel may lose what a client sends at once.
        server = await asyncio.start_server(self._take, "127.0.0.1", port, backlog=BACKLOG)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for peer in self._peers:
                await peer.close()


async def turned_away(port: int) -> str:
    """Connects to a loopback port, whose owner sends RST at once; our address as HOST:PORT, once it has.

    The kernel connects before the owner knows; an event loop would look later, and may find the RST already.
    On a busy machine `connect` itself does, which is why our address is ours before.
    """
    with socket.socket() as sock:
        sock.settimeout(PATIENCE_S)
        sock.bind(("127.0.0.1", 0))
        host, number = sock.getsockname()
        try:
            sock.connect(("127.0.0.1", port))
            sock.setblocking(False)
            async with asyncio.timeout(PATIENCE_S):
                data = await asyncio.get_running_loop().sock_recv(sock, 1)
        except ConnectionResetError:
            return f"{host}:{number}"
    raise AssertionError(f"not reset: {data!r}")

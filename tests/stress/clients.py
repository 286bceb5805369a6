"""Clients of the gateway: a recorded hello, then raw bytes, for hgate looks no further.

That is far cheaper than TLS, so the load is on what is under test and not on the client. What came back is
always compared with what was sent.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar, cast

from shared.net.legs.tcp_end import reset
from tests.stress.echo import ECHO

T = TypeVar("T")

PATIENCE_S = 30.0
"""Longer than anything takes on a busy machine, but short enough to be told as a failure in time."""


class BrokenError(Exception):
    """The tunnel ended, or brought back something else than was sent."""


class Tunnel(asyncio.Protocol):
    """One client connection."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.received = bytearray()
        """What has come and was not yet compared."""
        self.ended = False
        """FIN came, or the connection is gone."""
        self.lost = False
        self.error: Exception | None = None
        """Why it was lost; None after an orderly end."""
        self._waiter: asyncio.Future[None] | None = None

    # What the client does; BrokenError if the connection is gone.

    def send(self, data: bytes) -> None:
        """Sends as the other end takes it."""
        self._be_there()
        self.transport.write(data)

    def end(self) -> None:
        """Sends FIN."""
        self._be_there()
        self.transport.write_eof()

    def reset(self) -> None:
        """Sends RST."""
        reset(self.transport)

    def close(self) -> None:
        """Lets go of the connection."""
        self.transport.close()

    # What it waits for. BrokenError if it is not what comes.

    async def until(self, reached: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Returns once it is `reached`, which is `what` is waited for."""
        try:
            async with asyncio.timeout(timeout_s):
                while not reached():
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        except TimeoutError as error:
            raise BrokenError(f"{what} did not come within {timeout_s:g} s") from error

    async def echoed(self, data: bytes) -> None:
        """Waits for exactly `data`."""
        await self.until(lambda: len(self.received) >= len(data) or self.ended, "an echo")
        if self.received[: len(data)] != data:
            how = f"ended ({self.error or 'FIN'})" if self.ended else "wrong bytes"
            raise BrokenError(f"{how} after {len(self.received)} of {len(data)} bytes")
        del self.received[: len(data)]

    async def fin(self) -> None:
        """Waits for the other end's FIN, with nothing before it."""
        await self.until(lambda: self.ended, "an end")
        if self.error is not None or self.received:
            raise BrokenError(f"no clean end: {self.error or f'{len(self.received)} bytes too many'}")

    async def say(self, data: bytes) -> None:
        """Sends and waits for the echo."""
        self.send(data)
        await self.echoed(data)

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.received += data
        self._wake()

    def eof_received(self) -> bool:
        self.ended = True
        self._wake()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = self.lost = True
        self.error = exc
        self._wake()

    def _be_there(self) -> None:
        if self.transport.is_closing():
            raise BrokenError(f"gone ({self.error or 'closed'}) before all was said")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def connect(port: int, source: str | None = None) -> Tunnel:
    """Connects to a loopback port, from the loopback address `source` if there is one.

    Raises:
        BrokenError: it cannot.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(PATIENCE_S):
            _, tunnel = await loop.create_connection(
                Tunnel, "127.0.0.1", port, local_addr=(source, 0) if source else None
            )
    except OSError as error:
        raise BrokenError(f"no connection: {error.strerror or error}") from error
    return tunnel


async def opened(port: int, hello: bytes, source: str | None = None) -> Tunnel:
    """An open tunnel to the echo: its hello has come back.

    Raises:
        BrokenError: it could not be opened.
    """
    tunnel = await connect(port, source)
    first = hello + ECHO
    tunnel.send(first)
    try:
        await tunnel.echoed(first)
    except BaseException:
        tunnel.close()
        raise
    return tunnel


async def at_a_time(count: int, items: Iterable[T], act: Callable[[T], Awaitable[None]]) -> None:
    """Does it to all the items, to so many at the same time."""
    left = iter(items)

    async def some() -> None:
        for item in left:
            await act(item)

    await asyncio.gather(*(some() for _ in range(count)))


def some_bytes(count: int) -> bytes:
    """Bytes that nobody else sends."""
    return os.urandom(count)

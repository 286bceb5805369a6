"""An HTTP proxy that a test plays: what it is asked, and whatever it answers. Where it connects, all names
lead to one port of loopback, so names that nobody knows can be used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from shared.tasks import spawn
from tests.support.http1_server import listening


@dataclass(slots=True)
class ConnectProxy:
    """`async with ConnectProxy.listening(port) as proxy:` serves `proxy.port`, and leads to `port`."""

    leads_to: int
    port: int = 0
    asked: list[bytes] = field(default_factory=list)
    """The heads of requests."""

    answer: bytes = b"HTTP/1.1 200 Connection established\r\n\r\n"

    @classmethod
    @asynccontextmanager
    async def listening(cls, leads_to: int) -> AsyncIterator[ConnectProxy]:
        proxy = cls(leads_to)
        async with listening(proxy._serve) as proxy.port:
            yield proxy

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self.answer)
        if b" 200 " not in self.answer:
            return
        onward, back = await asyncio.open_connection("127.0.0.1", self.leads_to)
        down = spawn(_copied(onward, writer), name="down")
        await _copied(reader, back)
        await down
        back.close()


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()

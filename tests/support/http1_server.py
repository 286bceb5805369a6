"""What servers of HTTP/1.1 have in common when a test plays them: connections, requests, answers, TLS."""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import h11

from shared.credentials.certificates.authority import KeyPair

PATIENCE_S = 10
"""Longer than anything on loopback takes, even on a busy machine; reached only by a test that fails."""

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

R = TypeVar("R")


@asynccontextmanager
async def listening(handle: Handler, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Serves a loopback port, which it yields; when the block ends, waits until the last connection is
    closed, so that none is left for the garbage collector."""
    serving: set[asyncio.Task[object] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        serving.add(task)
        try:
            await handle(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # The client had its reasons, and a test of its own.
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            serving.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        remaining = [task for task in serving if task is not None]
        if remaining:
            await asyncio.wait(remaining, timeout=PATIENCE_S)


@dataclass(kw_only=True)
class NotingServer(Generic[R]):
    """A server that notes its requests, and listens from the beginning of its block to the end."""

    requests: list[R] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Open at first; while it is closed (`gate.clear()`) requests are read and not answered."""

    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _block: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aexit__(self, *_: object) -> None:
        self.gate.set()
        await self._block.aclose()

    async def seen(self, count: int) -> None:
        """Returns when `count` requests have come in altogether."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: len(self.requests) >= count)

    async def _listen(self, handle: Handler, *, tls: ssl.SSLContext | None = None) -> int:
        """Where it serves from now on."""
        self.gate.set()
        return await self._block.enter_async_context(listening(handle, tls=tls))

    async def _note(self, request: R) -> None:
        async with self._changed:
            self.requests.append(request)
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Received:
    """A whole request."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    connection: h11.Connection

    def answer(self, status: int, body: bytes, *headers: tuple[str, str]) -> bytes:
        """The bytes of an answer, after which the connection ends."""
        fields = [("content-length", str(len(body))), ("connection", "close"), *headers]
        events = (h11.Response(status_code=status, headers=fields), h11.Data(data=body), h11.EndOfMessage())
        return b"".join(self.connection.send(event) or b"" for event in events)


async def received(reader: asyncio.StreamReader) -> Received:
    """The next request, once it is whole. Raises ConnectionError if the client leaves before."""
    connection = h11.Connection(h11.SERVER)
    head: h11.Request | None = None
    body = b""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                headers = {name.decode(): value.decode() for name, value in head.headers}
                return Received(head.method.decode(), head.target.decode(), headers, body, connection)
            else:
                raise ConnectionError("the client has gone")


def server_tls(own: KeyPair) -> ssl.SSLContext:
    """For a server with this certificate, which asks for none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "server.pem")
        file.write_bytes(own.certificate_pem + own.key_pem)
        context.load_cert_chain(file)
    return context

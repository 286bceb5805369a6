"""A metadata server on loopback that tests can make slow, silent, wrong or absent.

Speaks real HTTP/1.1 through h11, checks what Google's checks (path, `Metadata-Flavor`) and keeps a list of
the requests that it saw.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import parse_qs, urlsplit

import h11

from tests.support.network import closed_port as closed_port

IDENTITY_PATH = "/computeMetadata/v1/instance/service-accounts/default/identity"

PATIENCE_S = 10
"""Longer than anything on loopback takes, even on a busy machine; reached only by a test that fails."""


def unsigned_token(**claims: object) -> str:
    """A JWT with these claims and a signature that nobody can verify."""
    header, payload = ({"alg": "RS256", "typ": "JWT"}, claims)
    parts = [json.dumps(part).encode() for part in (header, payload)] + [b"no real signature"]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


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


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server says: an HTTP answer, or with `raw` just these bytes and the end."""

    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    raw: bytes | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What the server was asked."""

    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]

    @property
    def audience(self) -> str:
        return self.query["audience"][0]


@dataclass(slots=True)
class MetadataServer:
    """`async with MetadataServer(answer) as server:` listens on `server.host` until the block ends."""

    answer: Callable[[Request], Answer]
    """Called for each request that the real server would serve; may be exchanged at any time."""

    requests: list[Request] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Open at first; while it is closed (`gate.clear()`) requests are read and not answered."""

    host: str = ""
    """`127.0.0.1:PORT`, known once the block has begun."""

    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _block: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> Self:
        self.gate.set()
        port = await self._block.enter_async_context(listening(self._serve))
        self.host = f"127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.gate.set()
        await self._block.aclose()

    async def seen(self, count: int) -> None:
        """Returns when `count` requests have come in altogether."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: len(self.requests) >= count)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await self._request(reader)
        if request is None:
            return
        async with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
        await self.gate.wait()
        writer.write(self._bytes(request))
        await writer.drain()

    async def _request(self, reader: asyncio.StreamReader) -> Request | None:
        connection = h11.Connection(h11.SERVER)
        while (event := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(await asyncio.wait_for(reader.read(65536), PATIENCE_S))
        if not isinstance(event, h11.Request):
            return None
        url = urlsplit(event.target.decode())
        headers = {name.decode(): value.decode() for name, value in event.headers}
        return Request(url.path, parse_qs(url.query), headers)

    def _bytes(self, request: Request) -> bytes:
        if request.headers.get("metadata-flavor") != "Google":
            answer = Answer(b"Missing Metadata-Flavor:Google header.", 403)
        elif request.path != IDENTITY_PATH:
            answer = Answer(b"not found", 404)
        else:
            answer = self.answer(request)
        if answer.raw is not None:
            return answer.raw
        connection = h11.Connection(h11.SERVER)
        connection.receive_data(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        while not isinstance(connection.next_event(), h11.EndOfMessage):
            pass
        headers = [("metadata-flavor", "Google"), ("content-length", str(len(answer.body))), *answer.headers]
        events = (
            h11.Response(status_code=answer.status, headers=headers),
            h11.Data(data=answer.body),
            h11.EndOfMessage(),
        )
        return b"".join(connection.send(event) or b"" for event in events)

"""A client of `tcp_app` behind a ztunnel's SOCKS port: `HOST PORT CASE`; it prints what it found, as JSON.

ztunnel says yes to SOCKS before it has asked anybody, so a connection that was refused is one without a byte.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.mesh.tcp_app import READY, digest, pieces

MIB = 1 << 20

PATIENCE_S = 60.0

Both = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(host: str, port: int) -> AsyncIterator[Both]:
    """The connection, of which nothing was read yet."""
    reader, writer = await asyncio.open_connection("127.0.0.1", 15080)
    try:
        writer.write(b"\5\1\0\5\1\0\1" + socket.inet_aton(host) + port.to_bytes(2, "big"))
        assert await reader.readexactly(2) == b"\5\0"
        assert (await reader.readexactly(10))[1] == 0
        yield reader, writer
    finally:
        writer.close()


@asynccontextmanager
async def opened(host: str, port: int, command: bytes) -> AsyncIterator[Both]:
    """A connection whose app has been told what to do."""
    async with connected(host, port) as (reader, writer):
        assert await reader.readexactly(len(READY)) == READY, "the app speaks first"
        writer.write(command + b"\n")
        yield reader, writer


async def answer(host: str, port: int) -> dict[str, Any]:
    """What comes of a connection: the app's first word, or nothing."""
    async with connected(host, port) as (reader, _):
        try:
            return {"first": (await reader.read(100)).decode()}
        except ConnectionError:
            return {"first": ""}


async def download(host: str, port: int) -> dict[str, Any]:
    """64 MiB from the app, to its end."""
    return {"bytes": await _taken(host, port, 64 * MIB)}


async def _taken(host: str, port: int, size: int) -> int:
    async with opened(host, port, b"give %d" % size) as (reader, _):
        for piece in pieces(size):
            assert await reader.readexactly(len(piece)) == piece
        assert await reader.read() == b"", "the app's end"
    return size


async def upload(host: str, port: int) -> dict[str, Any]:
    """64 MiB to the app, which answers behind the client's end: half-closed."""
    return {"bytes": await _given(host, port, 64 * MIB)}


async def _given(host: str, port: int, size: int) -> int:
    async with opened(host, port, b"take") as (reader, writer):
        for piece in pieces(size):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
        assert (await reader.read()).decode() == f"{size} {digest(size)}\n"
    return size


async def both(host: str, port: int) -> dict[str, Any]:
    """64 MiB each way at once, in two connections."""
    await asyncio.gather(_given(host, port, 64 * MIB), _taken(host, port, 64 * MIB))
    return {"bytes": 128 * MIB}


async def crowd(host: str, port: int) -> dict[str, Any]:
    """500 connections at once, each with 4 KiB echoed; all are open before the first ends."""
    met = asyncio.Barrier(500)

    async def one() -> None:
        async with opened(host, port, b"echo") as (reader, writer):
            for piece in pieces(4096):
                writer.write(piece)
                assert await reader.readexactly(len(piece)) == piece
            await met.wait()
            writer.write_eof()
            assert await reader.read() == b""

    await asyncio.gather(*(one() for _ in range(500)))
    return {"connections": 500}


async def turns(host: str, port: int) -> dict[str, Any]:
    """200 connections one after the other, each with a round trip of its own; the median of their times."""
    times: list[float] = []
    for _ in range(200):
        began = time.monotonic()
        async with opened(host, port, b"echo") as (reader, writer):
            writer.write(b"x")
            await reader.readexactly(1)
        times.append(time.monotonic() - began)
    return {"median_ms": round(sorted(times)[100] * 1000, 2)}


async def slow(host: str, port: int) -> dict[str, Any]:
    """A reader that reads nothing, beside whom another has his 16 MiB; then the first one has his, too."""
    size = 32 * MIB
    async with opened(host, port, b"give %d" % size) as (reader, _):
        await reader.readexactly(1)
        await _taken(host, port, 16 * MIB)
        await reader.readexactly(size - 1)
        assert await reader.read() == b""
    return {"bytes": size + 16 * MIB}


async def reset(host: str, port: int) -> dict[str, Any]:
    """A client that breaks off in the middle; the next one is served."""
    async with opened(host, port, b"give %d" % (32 * MIB)) as (reader, writer):
        await reader.readexactly(1000)
        writer.transport.abort()
    return await answer(host, port)


CASES = {case.__name__: case for case in (answer, download, upload, both, crowd, turns, slow, reset)}


async def main() -> None:
    host, port, name = sys.argv[1:]
    began = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        told = await CASES[name](host, int(port))
    print(json.dumps({**told, "seconds": round(time.monotonic() - began, 3)}))


if __name__ == "__main__":
    asyncio.run(main())

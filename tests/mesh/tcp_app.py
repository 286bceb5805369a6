"""An app that speaks no HTTP and speaks first: on 127.0.0.1:$PORT it says "ready" and waits for a line.

After `give N` it sends N bytes and ends. After `take` it reads to the end, and says how many bytes came
and their SHA-256. After `echo` it sends back what comes. Client and app agree on the bytes: `pieces`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator

READY = b"ready\n"

PIECE = bytes(range(256)) * 256


def pieces(size: int) -> Iterator[bytes]:
    """Bytes that both ends know, `size` in all."""
    while size > 0:
        yield PIECE[: min(size, len(PIECE))]
        size -= len(PIECE)


def digest(size: int) -> str:
    """What `take` says of them."""
    found = hashlib.sha256()
    for piece in pieces(size):
        found.update(piece)
    return found.hexdigest()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection."""
    try:
        writer.write(READY)
        match (await reader.readline()).split():
            case [b"give", size]:
                for piece in pieces(int(size)):
                    writer.write(piece)
                    await writer.drain()
            case [b"take"]:
                count, found = 0, hashlib.sha256()
                while data := await reader.read(1 << 18):
                    count += len(data)
                    found.update(data)
                writer.write(f"{count} {found.hexdigest()}\n".encode())
            case [b"echo"]:
                while data := await reader.read(1 << 16):
                    writer.write(data)
                    await writer.drain()
        writer.write_eof()
        await writer.drain()
        await reader.read()
    except ConnectionError:
        pass  # the client's end of it, which it knows of
    finally:
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", int(os.environ["PORT"]), backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())

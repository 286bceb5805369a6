"""A TCP port that leads to another one far away: each byte, and each end, arrives some milliseconds later.

Linux has `tc netem` for that, which takes root and a kernel with the module; this takes neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from shared.tasks import spawn

READ_BYTES = 1 << 16


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """One direction: what is read is written `delay_s` later, in the same order; so is FIN. RST is passed
    on."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def read() -> None:
        data = b"none yet"
        while data:
            data = await reader.read(READ_BYTES)
            under_way.put_nowait((loop.time() + delay_s, data))

    reading = spawn(read(), name="distance reads")
    try:
        while True:
            arriving = spawn(under_way.get(), name="distance waits")
            await asyncio.wait({arriving, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not arriving.done() and reading.exception() is not None:
                arriving.cancel()
                writer.transport.abort()
                return
            at, data = await arriving
            if at > loop.time():
                await asyncio.sleep(at - loop.time())
            if not data:
                writer.write_eof()
                return
            writer.write(data)
    finally:
        reading.cancel()


@asynccontextmanager
async def distance(port: int, delay_s: float) -> AsyncIterator[int]:
    """A loopback port that leads to the loopback port `port`, `delay_s` seconds away each way, until the
    block ends."""
    writers: list[asyncio.StreamWriter] = []

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            there, onward = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.transport.abort()
            return
        writers.append(onward)
        with suppress(OSError, RuntimeError):  # an end that has gone
            await asyncio.gather(_carry(reader, onward, delay_s), _carry(there, writer, delay_s))
        for end in (writer, onward):
            end.close()

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()

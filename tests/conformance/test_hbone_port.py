"""hgate's HBONE port passes h2spec whole.

h2spec shows no certificate; so its plain connections are carried into mTLS ones, byte by byte. It asks with
GET and POST, which the port answers with 405 and a line of text: enough of an answer for every case.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.address import Address
from shared.tasks import spawn
from tests.conformance.run import CASES, build, report, run_once
from tests.support import hbone_port
from tests.support.hbone_port import CALLER, HbonePort
from tests.support.tcp_peer import PATIENCE_S

ROOT = Path(__file__).parents[2]
READ_BYTES = 64 << 10


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One direction, up to its end or break."""
    with contextlib.suppress(OSError, RuntimeError):  # uvloop's for a transport that has closed
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def plain_entrance(port: HbonePort, tls: ssl.SSLContext) -> AsyncIterator[Address]:
    """A loopback port whose connections go on to `port` in TLS."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", port.port, ssl=tls, server_hostname="")
        await asyncio.gather(carry(reader, outer), carry(inner, writer))
        for one in (outer, writer):
            with contextlib.suppress(OSError):
                await one.wait_closed()

    visits: list[asyncio.Task[None]] = []
    server = await asyncio.start_server(
        lambda reader, writer: visits.append(spawn(take(reader, writer), name="visit")), "127.0.0.1", 0
    )
    try:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*visits)


@pytest.mark.parametrize("strict", CASES)
async def test_h2spec_passes_whole(tmp_path: Path, strict: bool) -> None:
    if os.environ.get("CI") != "true" and not (ROOT / ".venv/bin/h2spec").exists():
        pytest.skip("h2spec is not built: make conformance does it, with Go")
    h2spec = await asyncio.to_thread(build)
    async with hbone_port.serving(tmp_path) as port:
        async with plain_entrance(port, port.mesh.tls(port.mesh.member(CALLER))) as entrance:
            run = await asyncio.to_thread(run_once, h2spec, entrance, "/", strict)
        assert run.passed, report([run])
        await port.until(0)

"""Uploads to an app that does not read, and connections that are left alone: krun's memory and files are for
all."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from shared import open_files
from shared.tasks import spawn
from tests.stress import figures
from tests.stress.bystanders import beside
from tests.stress.clients import BrokenError
from tests.stress.mesh import HELLO, mesh
from tests.stress.run import Run
from tests.stress.verdict import MOST_P99_MS
from tests.stress.visits import client_fin

MARK_MIB = 128
"""HBONE_MAX_BUFFERED: half of a container with 256 MiB."""

MOST_GROWTH_MIB = 2 * MARK_MIB - 40
"""The rest of such a container; 40 MiB are the process itself."""

CONNECTIONS = 8
STREAMS = 100
"""Of each of them."""

UPLOADS = 2 * CONNECTIONS * STREAMS
"""In all: each that is ended is followed by another, until there have been so many. Without an end they would
be a flood of bytes, which takes CPU time from everybody whoever reads them."""

UPLOAD_BYTES = 8 << 20

ENOUGH_FILES = 500
"""Open at krun: half of the uploads are under way."""

BEGIN_S = 20.0
IDLE = 1200
"""Connections that are left alone: more than HBONE_MAX_CONNECTIONS."""

QUIET_S = 5.0
ATTACK_S = 20.0

MOST_TIMES = 2.0
"""Of the quiet p99, unless that is below what counts for nobody (`MOST_P99_MS`)."""


async def uploads(run: Run, attack_s: float = ATTACK_S, idle: int = IDLE, quiet_s: float = QUIET_S) -> None:
    """Both at once, beside tunnels that talk and new ones that are opened all the time."""
    program = shutil.which("h2load", path="/usr/bin:/usr/sbin:/usr/local/bin")
    if program is None:
        run.row("h2load", "is there (Debian: nghttp2-client)", "it is not", passed=False)
        return
    body = run.folder / "body"
    body.write_bytes(bytes(UPLOAD_BYTES))
    with _stalled() as app:
        told = {"HBONE_APP": f"127.0.0.1:{app}", "HBONE_MAX_BUFFERED": f"{MARK_MIB}MiB"}
        async with mesh(run.folder, environ=told) as running, beside(running.gateway.port, HELLO) as others:
            await asyncio.sleep(quiet_s)
            quiet_ms = others.p99_ms()
            pid = running.krun.pid
            async with (
                figures.watched(pid) as peak,
                _uploading(program, running.krun_port, body),
            ):
                begun = await figures.settled(lambda: figures.descriptors(pid) > ENOUGH_FILES, BEGIN_S)
                async with _idle(running.krun_port, idle) as left_alone:
                    newcomers, failed = await _newcomers(running.gateway.port, attack_s)
                    p99_ms = others.p99_ms()
            files = figures.descriptors(pid)
    growth_mib = peak.growth_kib / 1024
    run.row(
        f"{CONNECTIONS * STREAMS} uploads that nobody reads",
        f"krun grows by up to {MOST_GROWTH_MIB:.0f} MiB; HBONE_MAX_BUFFERED is {MARK_MIB}",
        f"{growth_mib:.0f} MiB, {files} files open afterwards" + ("" if begun else ", NOT BEGUN"),
        passed=begun and growth_mib <= MOST_GROWTH_MIB,
    )
    most_ms = max(MOST_TIMES * quiet_ms, MOST_P99_MS)
    run.row(
        "tunnels beside them",
        f"p99 up to {most_ms:.0f} ms ({quiet_ms:.0f} when quiet), none broken",
        f"{p99_ms:.0f} ms, {len(others.broken)} broken",
        passed=p99_ms <= most_ms and not others.broken,
    )
    run.row(
        f"new tunnels beside them and {left_alone} idle connections",
        "all are opened",
        f"{newcomers - len(failed)} of {newcomers}{f': {failed[0]}' if failed else ''}",
        passed=newcomers > 0 and not failed,
    )


@contextmanager
def _stalled() -> Iterator[int]:
    """The port of an app whose connections are never read from."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(4096)
        yield int(server.getsockname()[1])


@asynccontextmanager
async def _uploading(program: str, port: int, body: Path) -> AsyncIterator[None]:
    options = ("-c", str(CONNECTIONS), "-m", str(STREAMS), "-n", str(UPLOADS), "-d", str(body))
    process = await asyncio.create_subprocess_exec(
        *(program, "-p", "h2c", *options, f"http://127.0.0.1:{port}/upload"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@asynccontextmanager
async def _idle(port: int, count: int) -> AsyncIterator[int]:
    """Connections that say nothing; how many there are is what could be opened."""
    open_files.allow_many()
    loop = asyncio.get_running_loop()
    transports = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            transport, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", port)
            transports.append(transport)
    try:
        yield len(transports)
    finally:
        for transport in transports:
            transport.abort()


async def _newcomers(port: int, seconds: float) -> tuple[int, list[str]]:
    """Opens a tunnel, talks and ends it, again and again; how many, and what became of those that failed."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    count, failed = 0, []

    async def visit() -> None:
        nonlocal count
        count += 1
        try:
            await client_fin(port)
        except BrokenError as error:
            failed.append(str(error))

    while loop.time() < deadline:
        await spawn(visit(), name="newcomer")
        await asyncio.sleep(0.02)
    return count, failed

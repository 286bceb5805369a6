"""Clients that ask for much and read nothing: windows are large for who reads, hgate's memory is for all."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.tools import serving
from shared.address import Address
from tests.stress import figures
from tests.stress.bystanders import beside
from tests.stress.mesh import HELLO, ORIGIN_NAME, hello_for, mesh
from tests.stress.run import Run
from tests.stress.verdict import MOST_P99_MS

READERS = 1000

MARK_MIB = 256
"""max_buffered: half of a container with 512 MiB."""

MOST_GROWTH_MIB = 2 * MARK_MIB
"""By as much the process may grow: what is held is not all that holding it costs."""

RESET_AT = 1.1
"""Of the mark (`memory_budget`), and as much again for what comes between two checks."""

ASKED_BYTES = 64 << 20
"""What each wants: the largest window."""

BUFFER_BYTES = 64 << 10
"""The kernel's for each reader, so that what they do not read is hgate's to hold."""

SETTLE_S = 15.0

WATCHES = 30
"""How often what is held is asked for meanwhile."""


async def readers(run: Run, count: int = READERS, settle_s: float = SETTLE_S) -> None:
    """So many, beside tunnels that talk."""
    with serving("h2") as far:
        port = Address.parse(far).port
        limits = {"max_buffered": f"{MARK_MIB}MiB"}
        async with (
            mesh(run.folder, origin_port=port, limits=limits) as running,
            beside(running.gateway.port, HELLO) as others,
            figures.watched(running.hgate.pid) as peak,
        ):
            others.take()
            async with _asking(running.gateway.port, count) as asked:
                held_mib = 0.0
                for _ in range(WATCHES):
                    await asyncio.sleep(settle_s / WATCHES)
                    held_mib = max(held_mib, await running.metric("hbone_buffered_bytes") / (1 << 20))
                p99_ms = others.p99_ms()
    most_mib = MARK_MIB * (RESET_AT + (RESET_AT - 1))
    run.row(
        f"{asked} clients that ask for {ASKED_BYTES >> 20} MiB and read nothing",
        f"up to {most_mib:.0f} MiB held; max_buffered is {MARK_MIB}",
        f"{held_mib:.0f} MiB",
        passed=asked == count and 0 < held_mib <= most_mib,
    )
    growth_mib = peak.growth_kib / 1024
    run.row(
        "hgate's memory for them",
        f"grows by up to {MOST_GROWTH_MIB} MiB",
        f"{growth_mib:.0f} MiB",
        passed=growth_mib <= MOST_GROWTH_MIB,
    )
    run.row(
        "tunnels beside them",
        f"p99 up to {MOST_P99_MS:g} ms, none broken",
        f"{p99_ms:.0f} ms, {len(others.broken)} broken",
        passed=p99_ms <= MOST_P99_MS and not others.broken,
    )


@asynccontextmanager
async def _asking(port: int, count: int) -> AsyncIterator[int]:
    """Clients that have said what they want; how many there are."""
    loop = asyncio.get_running_loop()
    said = hello_for(ORIGIN_NAME) + b"X" + struct.pack(">QQ", 0, ASKED_BYTES)
    with contextlib.ExitStack() as block:
        asked = 0
        for _ in range(count):
            client = block.enter_context(socket.socket())
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            with contextlib.suppress(OSError):
                await loop.sock_connect(client, ("127.0.0.1", port))
                await loop.sock_sendall(client, said)
                asked += 1
        yield asked

"""Floods of hgate's health, metrics and admin ports, beside probes and tunnels that must not notice.

`python -m tests.stress.probes PORT KIND [PATH]` is one flood, in a process of its own, until it is stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared import loop
from shared.tasks import spawn
from tests.stress.bystanders import beside
from tests.stress.figures import percentile
from tests.stress.mesh import HELLO, Mesh, mesh
from tests.stress.run import Run
from tests.stress.verdict import MOST_P99_MS, others, unhurt

FLOOD_S = 5.0
PAUSE_S = 0.01
"""Between two probes."""

HELD = 200
"""Connections that each flood has at a time: three times the places of a port."""

CHURN_S = 0.002
"""After so long a flood of half requests gives one of its connections up for another."""

OWN_MS = 500.0
"""On the flooded port itself, where probes queue with the flood to be accepted: half of kubelet's second."""

PATIENCE_S = 10.0


async def probes(run: Run, flood_s: float = FLOOD_S) -> None:
    """Each flood of each port by itself, for so many seconds."""
    async with mesh(run.folder) as running, beside(running.gateway.port, HELLO) as bystanders:
        quiet = await _probed(running, flood_s)
        bystanders.take()
        quiet_ms = percentile(quiet, 0.99) * 1000
        most_ms = max(2 * quiet_ms, MOST_P99_MS)
        floods = {
            "health, half requests": (running.gateway.health, "half", "/"),
            "health, whole requests": (running.gateway.health, "whole", "/healthz/ready"),
            "metrics, whole requests": (running.gateway.metrics, "whole", "/metrics"),
            "admin, half requests": (running.gateway.admin, "half", "/"),
            "admin, whole requests": (running.gateway.admin, "whole", "/tunnels"),
        }
        for name, flood in floods.items():
            async with _flooding(*flood):
                probed = await _probed(running, flood_s)
            demanded_ms = OWN_MS if flood[0] == running.gateway.health else most_ms
            p99_ms, lost = percentile(probed, 0.99) * 1000, probed.count(PATIENCE_S)
            tunnels_ms = bystanders.p99_ms()
            run.row(
                name,
                f"each probe is answered, p99 ≤ {demanded_ms:.0f} ms; others' tunnels live on",
                f"{len(probed):,} probes, p99 {p99_ms:.0f} ms (quiet {quiet_ms:.0f}), {lost} lost; others "
                f"{others(bystanders, tunnels_ms)}",
                passed=not lost and p99_ms <= demanded_ms and unhurt(bystanders, tunnels_ms),
            )
        evicted = await running.metric("hbone_ops_connections_evicted_total")
        run.row("counted", "the metrics have it", f"{evicted:,.0f} made room", passed=evicted > 0)


async def _probed(running: Mesh, seconds: float) -> list[float]:
    """How long each probe took in seconds; PATIENCE_S for one that was not answered with 200."""
    clock = asyncio.get_running_loop().time
    taken: list[float] = []
    until = clock() + seconds
    while clock() < until:
        begun = clock()
        is_good = False
        with contextlib.suppress(OSError, TimeoutError, EOFError):
            async with asyncio.timeout(PATIENCE_S):
                is_good = await _asked(running.gateway.health)
        taken.append(clock() - begun if is_good else PATIENCE_S)
        await asyncio.sleep(PAUSE_S)
    return taken


async def _asked(port: int) -> bool:
    """As the kubelet does: a connection for each probe."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /healthz/ready HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        return (await reader.readline()).startswith(b"HTTP/1.1 200")
    finally:
        writer.transport.abort()


@asynccontextmanager
async def _flooding(port: int, kind: str, path: str) -> AsyncIterator[None]:
    command = (sys.executable, "-m", "tests.stress.probes", str(port), kind, path)
    flood = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert flood.stdout is not None
    await flood.stdout.readline()
    try:
        yield
    finally:
        flood.kill()
        await flood.wait()


# The flood.


def main() -> None:
    """Floods one port of this machine until it is killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.probes")
    parser.add_argument("port", type=int)
    parser.add_argument("kind", choices=("half", "whole"))
    parser.add_argument("path")
    given = parser.parse_args()
    loop.run(_half(given.port) if given.kind == "half" else _whole(given.port, given.path))


async def _half(port: int) -> None:
    """Connections with one byte each, of which the oldest is given up for another all the time."""
    held: list[asyncio.StreamWriter] = []
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"G")
            held.append(writer)
        if len(held) == HELD:
            print("at full strength", flush=True)
        if len(held) > HELD:
            held.pop(0).transport.abort()
            await asyncio.sleep(CHURN_S)


async def _whole(port: int, path: str) -> None:
    """Clients that ask for the same again as soon as they have it."""

    async def ask() -> None:
        while True:
            with contextlib.suppress(OSError, EOFError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                while True:
                    writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
                    head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                    await reader.readexactly(int(length))

    asking = [spawn(ask(), name="flood") for _ in range(HELD)]
    print("at full strength", flush=True)
    await asyncio.gather(*asking)


if __name__ == "__main__":
    main()

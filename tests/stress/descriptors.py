"""No descriptor is left (EMFILE): open tunnels live on, and new ones come as soon as there are some again."""

from __future__ import annotations

import asyncio
from collections import Counter

from bench.accounting import cpu_seconds
from shared import open_files
from shared.tasks import spawn
from tests.stress import figures
from tests.stress.bystanders import beside
from tests.stress.clients import BrokenError, Tunnel, opened, some_bytes
from tests.stress.mesh import HELLO, Mesh, mesh
from tests.stress.programs import Program
from tests.stress.run import Run

ROOM = 150
"""Descriptors that a program is given beyond those it has. Fewer than the streams of one connection between
hgate and krun, or hgate would refuse tunnels for want of another such connection, and never be full."""

CLIENTS = 300
"""Twice as many, so that half of them find no descriptor."""

STARVED_S = 5.0
"""How long the program is held without descriptors."""

MOST_CPU = 0.25
"""Of one core while nothing but the bystanders happens: an accept that fails and is tried again at once would
take a whole one."""

AT_ONCE_S = 1.0
"""For a new tunnel after the release: one try, no retry."""

RELEASE_S = 10.0
"""For a program to notice that its clients are gone."""

ENOUGH_HELD = 0.8
"""Share of the room that clients must have filled for the limit to have been reached; the rest is what the
program needs itself."""


async def exhaust(run: Run) -> None:
    """hgate, then krun, each without descriptors."""
    async with mesh(run.folder) as running:
        await _starve(run, running, running.hgate)
        await _starve(run, running, running.krun)


async def _starve(run: Run, running: Mesh, program: Program) -> None:
    port = running.gateway.port
    async with beside(port, HELLO) as bystanders:
        await asyncio.sleep(1)
        unstarved_ms = bystanders.p99_ms()
        limit = figures.descriptors(program.pid) + ROOM
        figures.limit_descriptors(program.pid, limit)
        try:
            # Each holds what it gets: a tunnel, or a connection that nobody has accepted yet.
            tries = [spawn(opened(port, HELLO), name="client") for _ in range(CLIENTS)]
            full = await figures.settled(
                lambda: figures.descriptors(program.pid) >= limit - (1 - ENOUGH_HELD) * ROOM, RELEASE_S
            )
            bystanders.take()
            cpu_s = cpu_seconds(program.pid)
            await asyncio.sleep(STARVED_S)
            share = (cpu_seconds(program.pid) - cpu_s) / STARVED_S
            p99_ms = bystanders.p99_ms()
            most = figures.descriptors(program.pid)
        finally:
            held = await _let_go(tries)
            await figures.settled(lambda: figures.descriptors(program.pid) <= limit - ROOM / 2, RELEASE_S)
            again_s, why = await _again(port)  # still with the low limit, which has room again
            figures.limit_descriptors(program.pid, open_files.allow_many())
    name = program.name
    reached = f"limit of {limit}" if full else f"limit of {limit} not reached"
    run.row(
        f"{name} survives",
        f"limit reached by held connections; {len(tries)} clients, the other tunnels echo on",
        f"{reached}: {most} in use, {_shown(held)}; bystanders: "
        f"{len(bystanders.broken)} broken, p99 {p99_ms:.0f} ms ({unstarved_ms:.0f} before)",
        passed=full and not bystanders.broken and program.exit_code is None,
    )
    run.row(
        f"{name} does not spin",
        f"up to {MOST_CPU:.0%} of a core for {STARVED_S:g} s without descriptors",
        f"{share:.0%}",
        passed=share <= MOST_CPU,
    )
    run.row(
        f"{name} recovers",
        f"after the release the first new tunnel is open within {AT_ONCE_S:g} s",
        why or f"{again_s * 1000:.0f} ms",
        passed=not why and again_s <= AT_ONCE_S,
    )


async def _let_go(tries: list[asyncio.Task[Tunnel]]) -> Counter[str]:
    """Ends all clients, and says what they were doing."""
    doing: Counter[str] = Counter()
    for task in tries:
        if not task.done():
            doing["waiting"] += 1
            task.cancel()
    for result in await asyncio.gather(*tries, return_exceptions=True):
        if isinstance(result, Tunnel):
            doing["held"] += 1
            result.close()
        elif isinstance(result, BrokenError):
            doing["turned away"] += 1
    return doing


async def _again(port: int) -> tuple[float, str]:
    """Opens a tunnel; how many seconds it took, and why it did not succeed."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        tunnel = await opened(port, HELLO)
        await tunnel.say(some_bytes(64))
        tunnel.close()
    except BrokenError as error:
        return loop.time() - started, str(error)
    return loop.time() - started, ""


def _shown(held: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in held.most_common())

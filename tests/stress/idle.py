"""Ten thousand idle tunnels at once, held through hgate and krun, and what each costs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from tests.stress import figures
from tests.stress.clients import BrokenError, Tunnel, at_a_time, opened, some_bytes
from tests.stress.figures import Figures
from tests.stress.mesh import HELLO, Mesh, mesh
from tests.stress.programs import Program
from tests.stress.run import Run

TUNNELS = 10_000
HOLD_S = 60.0

SOURCES = 100
"""Loopback addresses from which clients come: 100 tunnels from each, as from 100 pods."""

AT_A_TIME = 64
"""Tunnels being opened, and messages under way, at a time."""

WARM_UP = 500
"""Tunnels opened and closed before the first look, so that what a process keeps anyhow is not counted."""

MOST_KIB = {"hgate": 13.7, "krun": 19.5}
"""Memory per tunnel: what Envoy needs at the same place on the same wire."""

MOST_IDLE_CPU = 0.05
"""Of one core, for all tunnels that say nothing."""

SETTLE_S = 20.0


async def hold(run: Run, tunnels: int = TUNNELS, hold_s: float = HOLD_S, warm_up: int = WARM_UP) -> None:
    """Opens `tunnels`, holds them for `hold_s` seconds, and wants an echo of each."""
    async with mesh(run.folder) as running:
        programs = (running.hgate, running.krun)
        await _close(running, [tunnel for tunnel, _ in await _open(running, warm_up) if tunnel])
        before = [figures.look(program.pid) for program in programs]
        loop = asyncio.get_running_loop()
        started = loop.time()
        tried = await _open(running, tunnels)
        open_s = loop.time() - started
        held = [tunnel for tunnel, _ in tried if tunnel is not None]
        why = {text for _, text in tried if text}
        during = [figures.look(program.pid) for program in programs]
        await asyncio.sleep(hold_s)
        after = [figures.look(program.pid) for program in programs]
        alive = await _echoing(held)
        run.row(
            "all held",
            f"{tunnels:,} tunnels opened, silent for {hold_s:g} s, then all echo",
            f"{len(held):,} opened in {open_s:.1f} s, {alive:,} echo {_because(why)}",
            passed=alive == tunnels,
        )
        for program, was, then, now in zip(programs, before, during, after, strict=True):
            _memory(run, program, was, then, tunnels)
            _cpu(run, program, then, now, hold_s)
        await _close(running, held)
        await _back(run, running, programs, before)


async def _open(running: Mesh, count: int) -> list[tuple[Tunnel | None, str]]:
    """Tries `count` tunnels; each with the reason if it could not be opened."""
    tried: list[tuple[Tunnel | None, str]] = []

    async def one(number: int) -> None:
        source = f"127.0.1.{1 + number % SOURCES}"
        try:
            tried.append((await opened(running.gateway.port, HELLO, source), ""))
        except BrokenError as error:
            tried.append((None, str(error)))

    await at_a_time(AT_A_TIME, range(count), one)
    return tried


async def _echoing(tunnels: list[Tunnel]) -> int:
    """How many of the tunnels echo."""
    alive = 0

    async def one(tunnel: Tunnel) -> None:
        nonlocal alive
        with suppress(BrokenError):
            await tunnel.say(some_bytes(64))
            alive += 1

    await at_a_time(AT_A_TIME, tunnels, one)
    return alive


async def _close(running: Mesh, tunnels: list[Tunnel]) -> None:
    """Ends all tunnels in order, and waits until hgate counts none."""
    for tunnel in tunnels:
        tunnel.end()
    for tunnel in tunnels:
        await tunnel.fin()
        tunnel.close()
    await running.nothing_left(SETTLE_S)


def _memory(run: Run, program: Program, before: Figures, during: Figures, tunnels: int) -> None:
    rss = (during.rss_kib - before.rss_kib) / tunnels
    pss = (during.pss_kib - before.pss_kib) / tunnels
    most = MOST_KIB[program.name]
    run.row(
        f"memory, {program.name}",
        f"up to {most} KiB a tunnel, as Envoy",
        f"{rss:.2f} KiB a tunnel (PSS {pss:.2f}); RSS {before.rss_kib / 1024:.0f} → "
        f"{during.rss_kib / 1024:.0f} MiB, {during.descriptors:,} descriptors",
        passed=rss <= most,
    )


def _cpu(run: Run, program: Program, during: Figures, after: Figures, hold_s: float) -> None:
    share = (after.cpu_s - during.cpu_s) / hold_s
    run.row(
        f"idle CPU, {program.name}",
        f"up to {MOST_IDLE_CPU:.0%} of a core",
        f"{share:.1%}",
        passed=share <= MOST_IDLE_CPU,
    )


async def _back(run: Run, running: Mesh, programs: Iterable[Program], before: list[Figures]) -> None:
    left = await running.nothing_left(SETTLE_S)
    now = [figures.look(program.pid) for program in programs]
    descriptors = ", ".join(
        f"{was.descriptors} → {each.descriptors}" for was, each in zip(before, now, strict=True)
    )
    memory = ", ".join(f"{each.rss_kib / 1024:.0f}" for each in now)
    run.row(
        "afterwards",
        "nothing counted as open",
        f"{left}; descriptors of hgate, krun {descriptors}; RSS {memory} MiB",
        passed=not any(left.values()),
    )


def _because(why: Iterable[str]) -> str:
    shown = sorted(why)[:3]
    return f"({'; '.join(shown)})" if shown else ""

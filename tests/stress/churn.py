"""A hundred thousand tunnels opened and ended in every way, and whether anything of them stays."""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.stress import figures
from tests.stress.clients import BrokenError, at_a_time
from tests.stress.figures import Figures
from tests.stress.mesh import Mesh, mesh
from tests.stress.programs import Program
from tests.stress.run import Run
from tests.stress.visits import VISITS

TUNNELS = 100_000
WARM_UP = 10_000
"""Opened and ended before the baseline: caches fill, and the allocator takes what it goes on to use."""

AT_A_TIME = 64

MOST_GROWTH_KIB = 4 << 10
"""Of RSS over the baseline: 42 bytes a tunnel, less than the smallest object that could be left of each."""

MORE_DESCRIPTORS = 2
"""Over the baseline: a connection between hgate and krun more or less, which is kept for the next tunnels."""

SETTLE_S = 45.0
"""For all ends: a connection whose peer does not end may linger for 30 s."""

NOTE_EVERY = 20_000


async def churn(run: Run, tunnels: int = TUNNELS, warm_up: int = WARM_UP) -> None:
    """Opens and ends `warm_up` tunnels, looks, opens and ends `tunnels` more, and looks again."""
    async with mesh(run.folder) as running:
        programs = (running.hgate, running.krun)
        await _visits(run, running, warm_up)
        before = await _quiet(running, programs, None)
        loop = asyncio.get_running_loop()
        started = loop.time()
        failures = await _visits(run, running, tunnels)
        took_s = loop.time() - started
        run.row(
            "every end as it should be",
            f"{tunnels:,} tunnels, {AT_A_TIME} at a time: FIN and RST of either side, early ones, refused "
            "ones; every byte compared",
            f"{failures.total():,} went wrong, {tunnels / took_s:,.0f} tunnels/s {_shown(failures)}",
            passed=not failures,
        )
        tails = running.echo.count("tail")
        run.row("the server ends first", "what comes after it arrives", f"{tails} lost", passed=not tails)
        left = await running.nothing_left(SETTLE_S)
        run.row("counted", "nothing open", str(left), passed=not any(left.values()))
        now = await _quiet(running, programs, before)
        for program, was, each in zip(programs, before, now, strict=True):
            _compare(run, program, was, each, tunnels)
            run.row(
                f"CPU, {program.name}",
                "no demand",
                f"{(each.cpu_s - was.cpu_s) / tunnels * 1e6:.0f} µs a tunnel",
                passed=True,
            )


async def _visits(run: Run, running: Mesh, count: int) -> Counter[str]:
    """Makes `count` visits; how often which went wrong, and how."""
    failures: Counter[str] = Counter()

    async def one(number: int) -> None:
        visit = VISITS[number % len(VISITS)]
        try:
            await visit(running.gateway.port)
        except BrokenError as error:
            failures[f"{getattr(visit, '__name__', visit)}: {error}"] += 1
        if number and number % NOTE_EVERY == 0:
            run.note(f"{number:,} tunnels")

    await at_a_time(AT_A_TIME, range(count), one)
    return failures


async def _quiet(running: Mesh, programs: tuple[Program, ...], before: list[Figures] | None) -> list[Figures]:
    """Looks at the programs once nothing is open any more, and descriptors are as they were `before`."""
    await running.nothing_left(SETTLE_S)

    def settled() -> bool:
        return before is None or all(
            figures.descriptors(program.pid) <= was.descriptors + MORE_DESCRIPTORS
            for program, was in zip(programs, before, strict=True)
        )

    await figures.settled(settled, SETTLE_S)
    return [figures.look(program.pid) for program in programs]


def _compare(run: Run, program: Program, before: Figures, now: Figures, tunnels: int) -> None:
    growth = now.rss_kib - before.rss_kib
    kept = f"descriptors {before.descriptors} → {now.descriptors}, threads {before.threads} → {now.threads}"
    memory = f"RSS {before.rss_kib / 1024:.1f} → {now.rss_kib / 1024:.1f} MiB"
    run.row(
        f"left, {program.name}",
        f"descriptors up to {MORE_DESCRIPTORS} more, threads the same, RSS up to {MOST_GROWTH_KIB >> 10} MiB "
        "more than before",
        f"{kept}, {memory} ({growth * 1024 / tunnels:+.0f} B a tunnel)",
        passed=(
            now.descriptors <= before.descriptors + MORE_DESCRIPTORS
            and now.threads == before.threads
            and growth <= MOST_GROWTH_KIB
        ),
    )


def _shown(failures: Counter[str]) -> str:
    most = [f"{count:,} times {text}" for text, count in failures.most_common(3)]
    return f"({'; '.join(most)})" if most else ""

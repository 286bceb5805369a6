"""Attacks that wait, on all ports, and connections that are only there."""

from __future__ import annotations

import asyncio

from tests.stress import attack, figures
from tests.stress.bystanders import beside
from tests.stress.mesh import HELLO_NAME, Mesh, hello_for, mesh
from tests.stress.programs import Program
from tests.stress.run import Run
from tests.stress.verdict import MOST_P99_MS, ends, others, others_row, pids, target, unhurt
from tests.support import stalls
from tests.support.attacker import FLOOD_S
from tests.support.stalls import Stall

HALF_OPEN = 1000
HALF_OPEN_S = 5.0
MOST_HALF_OPEN_KIB = 96.0
"""For a connection that says nothing more: less than a tunnel costs the original's gateway."""

STALLED = 10
"""Connections of each attack that stalls."""

HELLOS = 200
"""The same at hgate, where a connection that waits is worth a timer and a socket."""

UNREAD_KINDS = 2
"""Attacks that open tunnels and do not take what these bring back."""

MOST_UNREAD_KIB = 128.0
"""For each such tunnel: one read of 64 KiB in the stream, and its share of what the connection holds."""

HOLD_S = 90.0
"""How long they are watched: longer than the longest deadline."""

GRACE_S = 2.0
"""Over the deadline of a stall: timers and a busy machine."""


async def stall(run: Run, hold_s: float = HOLD_S) -> None:
    """Attacks that wait, all at the same time, and connections that are only there."""
    async with mesh(run.folder, cloudrun=True) as running:
        await _half_open(run, running, running.krun, tls=False)
        assert running.cloudrun is not None
        await _half_open(run, running, running.cloudrun, tls=True)
        async with (
            beside(running.gateway.port, hello_for(HELLO_NAME)) as bystanders,
            figures.watched(*pids(running)) as peak,
            asyncio.TaskGroup() as group,
        ):
            for offence in stalls.stalls(attack.PATH).values():
                if offence.ends_within_s is not None:
                    for tls in (False, True):
                        port, more, _ = target(running, tls=tls)
                        group.create_task(_stall(run, port, "stall", offence, hold_s, *more))
            for offence in stalls.slow_hellos().values():
                group.create_task(_stall(run, running.gateway.port, "hello", offence, hold_s))
        others_row(run, "others beside all of them", bystanders, bystanders.p99_ms())
        streams = UNREAD_KINDS * STALLED * stalls.TUNNELS
        each_kib = peak.growth_kib / streams
        run.row(
            "memory for echoes that nobody takes",
            f"up to {MOST_UNREAD_KIB:g} KiB for each of {streams:,} streams on a port",
            f"{each_kib:.0f} KiB, {peak.growth_kib / 1024:.0f} MiB in all",
            passed=each_kib <= MOST_UNREAD_KIB,
        )


async def _stall(run: Run, port: int, kind: str, offence: Stall, hold_s: float, *more: str) -> None:
    assert offence.ends_within_s is not None
    least_s = min(hold_s, offence.ends_within_s + GRACE_S)
    count = HELLOS if kind == "hello" else STALLED
    options = ("--connections", count, "--hold", least_s + GRACE_S, *more)
    async with attack.started(port, kind, offence.name, *options) as attacking:
        outcomes = await attacking.outcomes()
    where = "hgate" if kind == "hello" else "TLS" if more else "h2c"
    run.row(
        f"{where}, {offence.name}",
        f"ended within {offence.ends_within_s:g} s",
        ends(outcomes),
        passed=all(outcome.ended and outcome.seconds <= least_s for outcome in outcomes),
    )


async def _half_open(run: Run, running: Mesh, program: Program, *, tls: bool) -> None:
    port, more, sni = target(running, tls=tls)
    name = "SETTINGS, then silence"
    options = ("--connections", HALF_OPEN, "--hold", HALF_OPEN_S, *more)
    async with beside(running.gateway.port, hello_for(sni)) as bystanders:
        before = figures.descriptors(program.pid)
        async with (
            figures.watched(program.pid) as peak,
            attack.started(port, "stall", name, *options) as attacking,
        ):
            bystanders.take()
            await attacking.outcomes()
            p99_ms = bystanders.p99_ms()
        gone = await figures.settled(lambda: figures.descriptors(program.pid) <= before, FLOOD_S)
    each_kib = peak.growth_kib / HALF_OPEN
    run.row(
        f"{'TLS' if tls else 'h2c'}, half-open connections",
        f"{HALF_OPEN} cost up to {MOST_HALF_OPEN_KIB:g} KiB each, and leave nothing; others' p99 ≤ "
        f"{MOST_P99_MS:g} ms",
        f"{each_kib:.1f} KiB each, {'all gone' if gone else 'some stay'}; others "
        f"{others(bystanders, p99_ms)}",
        passed=each_kib <= MOST_HALF_OPEN_KIB and gone and unhurt(bystanders, p99_ms),
    )

"""Floods of krun's h2c port and the stand-in's TLS port."""

from __future__ import annotations

from collections.abc import Sequence

from tests.stress import attack, figures
from tests.stress.bystanders import Bystanders, beside
from tests.stress.mesh import Mesh, hello_for, mesh
from tests.stress.run import Run
from tests.stress.verdict import (
    MOST_GROWTH_MIB,
    MOST_P99_MS,
    TRIES,
    ends,
    named,
    nothing_left_row,
    others,
    pids,
    target,
    unhurt,
)
from tests.support import floods
from tests.support.attacker import FLOOD_S, Outcome
from tests.support.floods import Flood


async def flood(run: Run, names: Sequence[str] = ()) -> None:
    """Every flood, or those with these names, on both ports."""
    async with mesh(run.folder, cloudrun=True) as running:
        for name, offence in floods.floods(attack.PATH).items():
            if not names or name in names:
                await _flood(run, running, offence, tls=False)
                await _flood(run, running, offence, tls=True)
        await nothing_left_row(run, running)


async def _flood(run: Run, running: Mesh, offence: Flood, *, tls: bool) -> None:
    for _ in range(TRIES):
        outcomes, bystanders, p99_ms, growth_mib = await _once(running, offence, tls=tls)
        if bystanders.broken or p99_ms <= MOST_P99_MS:
            break
    answered = [_fits(offence, outcome) for outcome in outcomes]
    ended = f"ended, {named(offence.codes)}, within {FLOOD_S:g} s" if not offence.may_stay else "may stay"
    run.row(
        f"{'TLS' if tls else 'h2c'}, {offence.name}",
        f"{ended}; others' p99 ≤ {MOST_P99_MS:g} ms, ≤ {MOST_GROWTH_MIB} MiB more",
        f"{ends(outcomes)}; others {others(bystanders, p99_ms)}; {growth_mib:+.1f} MiB",
        passed=(offence.may_stay or all(answered)) and unhurt(bystanders, p99_ms, growth_mib),
    )


async def _once(
    running: Mesh, offence: Flood, *, tls: bool
) -> tuple[list[Outcome], Bystanders, float, float]:
    """How the attacks ended, who was beside them, their p99 in ms, and the most MiB that a server grew."""
    port, more, sni = target(running, tls=tls)
    async with (
        beside(running.gateway.port, hello_for(sni)) as bystanders,
        figures.watched(*pids(running)) as peak,
        attack.started(port, "flood", offence.name, *more) as attacking,
    ):
        bystanders.take()
        outcomes = await attacking.outcomes()
        p99_ms = bystanders.p99_ms()
    return outcomes, bystanders, p99_ms, peak.growth_kib / 1024


def _fits(offence: Flood, outcome: Outcome) -> bool:
    """Ended by GOAWAY with a code that fits, or every request answered by a status that does."""
    if outcome.ended:
        return outcome.code in offence.codes
    answers = sum(outcome.statuses.values())
    return answers >= offence.count and {status.encode() for status in outcome.statuses} <= offence.statuses

"""Floods of krun's h2c port and the stand-in's TLS port."""

from __future__ import annotations

from collections.abc import Sequence

from tests.stress import attack, figures
from tests.stress.mesh import Mesh, mesh
from tests.stress.run import Run
from tests.stress.verdict import (
    MOST_GROWTH_MIB,
    MOST_P99_MS,
    TRIES,
    attacked,
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
    port, more, sni = target(running, tls=tls)
    for _ in range(TRIES):
        async with figures.watched(*pids(running)) as peak:
            outcomes, bystanders, p99_ms = await attacked(running, sni, port, "flood", offence.name, *more)
        if bystanders.broken or p99_ms <= MOST_P99_MS:
            break
    growth_mib = peak.growth_kib / 1024
    answered = [_fits(offence, outcome) for outcome in outcomes]
    ended = f"ended, {named(offence.codes)}, within {FLOOD_S:g} s" if not offence.may_stay else "may stay"
    run.row(
        f"{'TLS' if tls else 'h2c'}, {offence.name}",
        f"{ended}; others' p99 ≤ {MOST_P99_MS:g} ms, ≤ {MOST_GROWTH_MIB} MiB more",
        f"{ends(outcomes)}; others {others(bystanders, p99_ms)}; {growth_mib:+.1f} MiB",
        passed=(offence.may_stay or all(answered)) and unhurt(bystanders, p99_ms, growth_mib),
    )


def _fits(offence: Flood, outcome: Outcome) -> bool:
    """Ended by GOAWAY with a code that fits, or every request answered by a status that does."""
    if outcome.ended:
        return outcome.code in offence.codes
    answers = sum(outcome.statuses.values())
    return answers >= offence.count and {status.encode() for status in outcome.statuses} <= offence.statuses

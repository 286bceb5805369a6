"""A successor takes over, and the file is read again a hundred times, while clients come, stay and go."""

from __future__ import annotations

import asyncio
import signal

from shared.errors import EXIT_OK
from tests.stress import figures
from tests.stress.bystanders import Bystanders, beside
from tests.stress.clients import BrokenError, opened
from tests.stress.gateway_file import route, start_hgate
from tests.stress.mesh import HELLO, Mesh, hello_for, mesh
from tests.stress.run import Run
from tests.stress.traffic import flowing

RESTARTS = 5
RELOADS = 100

BY_CHANGE = 10
"""Of the reloads, those that the gateway is to notice by itself; it looks every two seconds."""

STAYING = 50
"""Tunnels that talk the whole time."""

STAY_S = 3.0
"""How long they stay after SIGTERM: well within the 20 s that the file gives a drain."""

DRAIN_S = 40.0
"""For the predecessor to end: `drain_timeout`, and what it takes for its listeners to close."""

RELOAD_S = 10.0

SWITCHED_NAME = "outbound_.8080_._.switched.demo.svc.cluster.local"
"""Every other file has a route for it."""

RELOADED = r'"reload: \d+ routes'
STAYED = "the running configuration stays"


async def rolling(run: Run, restarts: int = RESTARTS) -> None:
    """Starts a gateway beside the one that runs, with the same file, and ends the older; several times."""
    async with mesh(run.folder) as running, flowing(running.gateway.port) as traffic:
        broken: list[str] = []
        codes: list[int | None] = []
        for number in range(1, restarts + 1):
            async with beside(running.gateway.port, HELLO, STAYING) as staying:
                codes.append(await _replace(run, running, staying, f"hgate-{number}"))
            broken += staying.broken
        await traffic.stop()
        run.row(
            "new tunnels",
            f"{restarts} times a successor and SIGTERM: no failed connection",
            str(traffic),
            passed=traffic.served > 0 and not traffic.failed,
        )
        run.row(
            "open tunnels",
            f"{STAYING} talk on at each: none broken",
            f"{len(broken)} broken {broken[:2] or ''}",
            passed=not broken,
        )
        run.row(
            "predecessors",
            f"end in order within {DRAIN_S:g} s (exit code 0)",
            f"exit codes {codes}",
            passed=codes == [EXIT_OK] * restarts,
        )


async def _replace(run: Run, running: Mesh, staying: Bystanders, name: str) -> int | None:
    """One replacement; the predecessor's exit code."""
    old, running.hgate = running.hgate, running.start(start_hgate(name, running.gateway, run.folder))
    await running.hgate.said('"ready"')
    old.send(signal.SIGTERM)
    await asyncio.sleep(STAY_S)
    await staying.stop()
    code = await old.ended(DRAIN_S)
    run.note(f"{old.name} ended with {code}, {len(staying.broken)} broken")
    return code


async def reloads(run: Run, count: int = RELOADS, by_change: int = BY_CHANGE) -> None:
    """Reads the file again `count` times, `by_change` of them unasked, and a broken one in between."""
    async with mesh(run.folder) as running:
        port = running.gateway.port
        async with beside(port, HELLO, STAYING) as staying, flowing(port) as traffic:
            missed = [0, 0]
            wrong: list[str] = []
            for number in range(count):
                unasked = number < by_change
                if not await _reload(running, switched=number % 2 == 0, ask=not unasked):
                    missed[unasked] += 1
                wrong += await _routed_wrongly(port, switched=number % 2 == 0)
            said = await _broken_file(running)
        late = f"missed {missed[0]} on SIGHUP, {missed[1]} on change"
        run.row(
            "done",
            f"{count - by_change} on SIGHUP, {by_change} on change; each one's routes count at once",
            f"{late}; {len(wrong)} routed wrongly {wrong[:2] or ''}",
            passed=not any(missed) and not wrong,
        )
        run.row("new tunnels", "no failed connection", str(traffic), passed=not traffic.failed)
        run.row(
            "open tunnels",
            f"{STAYING} talk on: none broken",
            f"{len(staying.broken)} broken {staying.broken[:2] or ''}",
            passed=not staying.broken,
        )
        run.row("a broken file", "the old one stays, and the log says so", said, passed=said == STAYED)


async def _reload(running: Mesh, *, switched: bool, ask: bool) -> bool:
    """Puts a new file there; whether it was read in time."""
    before = running.hgate.count(RELOADED)
    running.gateway.write(*([route(SWITCHED_NAME, running.krun_port, "echo")] if switched else []))
    if ask:
        running.hgate.send(signal.SIGHUP)
    return await figures.settled(lambda: running.hgate.count(RELOADED) > before, RELOAD_S)


async def _routed_wrongly(port: int, *, switched: bool) -> list[str]:
    """What is wrong if the name that comes and goes has no route, or still has one once it is gone."""
    try:
        tunnel = await opened(port, _SWITCHED)
        tunnel.close()
    except BrokenError as error:
        return [str(error)] if switched else []
    return [] if switched else ["a route that is gone was used"]


async def _broken_file(running: Mesh) -> str:
    """What the gateway says of a file with a mistake."""
    running.gateway.put("routes: [{host: a, tunnel: nonsense}]")
    running.hgate.send(signal.SIGHUP)
    if not await figures.settled(lambda: running.hgate.count(STAYED) > 0, RELOAD_S):
        return "nothing"
    running.hgate.forgive(STAYED)
    wrong = await _routed_wrongly(running.gateway.port, switched=False)
    return wrong[0] if wrong else STAYED


_SWITCHED = hello_for(SWITCHED_NAME)

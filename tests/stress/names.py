"""A client without credentials, and a member of the mesh, ask for names that nobody answers, or that are not
there: those who ask for good names notice nothing.

hgate runs in a network of its own, whose name server takes 30 ms for an answer, and never gives some. Each
dial here needs a look-up, and a connection that is not there yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from shared.tasks import spawn
from tests.stress.figures import percentile
from tests.stress.run import Run
from tests.support.dns_world import ATTACKER, LATENCY_S, POD_RESOLV_CONF, Crowd, World, names, sni, world
from tests.support.name_server import late, never
from tests.support.network_namespace import POD, NoNetworkError, network

DIALS = 200
"""Of those who ask for good names, quiet and under attack."""

A_SECOND = 100
"""Names that the anonymous client says; half of them nobody answers, half are not there."""

CONNECTS = 8
"""That the member of the mesh has under way, and leaves behind ten times a second."""

MOST = 2.0
"""Times what it takes while it is quiet."""


async def random_names(run: Run, dials: int = DIALS) -> None:
    """The 99th percentile of honest dials stays within MOST times the quiet one."""
    try:
        with network(run.folder) as net:
            net.resolv_conf.write_text(POD_RESOLV_CONF)
            await _measure(run, dials)
    except NoNetworkError as error:
        run.row("whole", "a network namespace", str(error), passed=False)


async def _measure(run: Run, dials: int) -> None:
    async with names() as server, world(run.folder) as it:
        server.names = {"*honest*.good.test.": (POD,)}
        server.faults = {"*dead*": never, "*": late(LATENCY_S)}
        await _dials(it, "warm", 10)
        quiet = await _dials(it, "quiet", dials)
        async with _attacks(it):
            await server.until(lambda: len([name for name in server.asked_names if "dead" in name]) > 20)
            busy = await _dials(it, "busy", dials)
        refused = await it.gateway.metric("hbone_limit_refusals_total", "max_lookups_per_client")
        abandoned = await it.gateway.metric("hbone_dns_lookups_total", "abandoned")
    for place, way in enumerate(("by server name", "CONNECT")):
        before, under = (percentile(times[place], 0.99) * 1000 for times in (quiet, busy))
        run.row(
            f"{way}, beside {A_SECOND} random names a second and {CONNECTS} dead CONNECTs",
            f"p99 of a dial ≤ {MOST:g} times the quiet one",
            f"{under:.0f} ms, quiet {before:.0f}; refused {refused:.0f}, look-ups given up {abandoned:.0f}",
            passed=under <= MOST * before,
        )


async def _dials(it: World, what: str, count: int) -> tuple[list[float], list[float]]:
    """Seconds of so many dials by server name, and with CONNECT."""
    by_name, by_connect = [], []
    for number in range(count):
        by_name.append(await it.hello(f"{what}-honest{number}"))
        status, text, took_s = await it.connect(f"{what}-honest-too{number}.good.test")
        assert status == 200, text
        by_connect.append(took_s)
    return by_name, by_connect


@asynccontextmanager
async def _attacks(it: World) -> AsyncIterator[None]:
    tasks = [spawn(_say_names(it), name="anonymous"), spawn(_connect(it), name="member")]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def _say_names(it: World) -> None:
    loop = asyncio.get_running_loop()
    template = sni("dead0000")  # nothing in a hello depends on the name but its length
    started = loop.time()
    while True:
        async with Crowd() as crowd:
            for number in range(5 * A_SECOND):
                kind = b"dead" if number % 2 else b"none"
                first = template.replace(b"dead0000", b"%s%04d" % (kind, number))
                await crowd.say(it.gateway.port, ATTACKER, first)
                await asyncio.sleep(started + number / A_SECOND - loop.time())
        started = loop.time()


async def _connect(it: World) -> None:
    number = 0
    while True:
        async with it.member() as peer:
            for _ in range(CONNECTS):
                number += 1
                peer.request(b"CONNECT", b"", authority=b"%d.dead.test:80" % number)
            await peer.answered()
            await asyncio.sleep(0.1)

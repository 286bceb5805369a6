"""Metrics of look-ups."""

from __future__ import annotations

import asyncio

from shared.address import Address
from shared.net.names.dns_query import KINDS, ResolveError
from shared.net.names.resolver import (
    MAX_KEPT,
    MAX_LOOKUPS,
    MAX_LOOKUPS_OF_OURS,
    Resolver,
)
from shared.ops.dns_metrics import families
from shared.tasks import spawn
from tests.support.name_server import failing, name_server, never


def samples(resolver: Resolver) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("hbone_dns_"), *sample.labels.values()): sample.value
        for family in families(resolver.numbers)
        for sample in family.samples
    }


async def test_what_came_of_look_ups() -> None:
    async with name_server() as server:
        server.names = {"good.test.": ("10.0.0.1",)}
        server.faults = {"broken.test.": failing(2), "dead.test.": never}
        resolver = Resolver([f"127.0.0.1:{server.port}"])

        async def ask(name: str, party: str = "") -> None:
            try:
                await resolver.resolve(Address(f"{name}.", 80), party)
            except ResolveError:
                return

        for name in ("good.test", "good.test", "broken.test", "none.test"):
            await ask(name)
        waiting = [spawn(ask("dead.test", "10.0.0.9"), name="a"), spawn(ask("dead.test"), name="b")]
        await server.until(lambda: len(server.questions("dead.test.")) == 2)
        told = samples(resolver)
        assert told["lookups_running", "clients"] == 1
        assert told["lookups_running", "settings"] == 0  # it waits for the client's
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        told = samples(resolver)
    results = {key[1]: value for key, value in told.items() if key[0] == "lookups_total"}
    assert set(results) == {"found", "abandoned", *KINDS}
    assert {result: count for result, count in results.items() if count} == {
        "found": 1,
        "abandoned": 1,
        "failed": 1,
        "no_name": 1,
    }
    assert told["lookups_reused_total",] == 2
    assert told["lookup_seconds_total",] > 0
    assert told["lookups_running", "clients"] == told["lookups_waiting", "clients"] == 0
    assert told["lookups_limit", "clients"] == MAX_LOOKUPS
    assert told["lookups_limit", "settings"] == MAX_LOOKUPS_OF_OURS
    assert (told["answers",], told["answers_limit",]) == (3, MAX_KEPT)

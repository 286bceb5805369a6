"""Clients of hgate that say hello and break off at once, which hgate must not take out on its peer."""

from __future__ import annotations

from tests.stress.mesh import CLOUDRUN_NAME, HELLO_NAME, mesh
from tests.stress.run import Run
from tests.stress.verdict import MOST_P99_MS, attacked, nothing_left_row, others, unhurt

CLIENTS = 4_000
"""In all, on each way; in ten seconds."""


async def impatient(run: Run, clients: int = CLIENTS) -> None:
    """The connection on which hgate carries everybody's tunnels must not be ended for them."""
    async with mesh(run.folder, cloudrun=True) as running:
        for name, where in ((HELLO_NAME, "h2c"), (CLOUDRUN_NAME, "TLS")):
            port = running.gateway.port
            (outcome,), bystanders, p99_ms = await attacked(
                running, name, port, "impatient", name, "--connections", clients
            )
            run.row(
                f"{where} upstream, hello and RST",
                f"{clients:,} clients: others' tunnels live on, p99 ≤ {MOST_P99_MS:g} ms",
                f"all in {outcome.seconds:.1f} s; others {others(bystanders, p99_ms)}",
                passed=unhurt(bystanders, p99_ms),
            )
        await nothing_left_row(run, running)

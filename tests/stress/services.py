"""Clients of hgate without any credential that ask for random services, each of which would need a token."""

from __future__ import annotations

import time

from gateway.config.limit_settings import Limits
from gateway.sni.new_audiences import MINUTE_S
from tests.stress.bystanders import beside
from tests.stress.mesh import TOKEN_NAME, TOKEN_NAMES, hello_for, mesh
from tests.stress.run import Run
from tests.stress.verdict import attacked, nothing_left_row, others_row
from tests.support.metadata_server import MetadataServer
from tests.support.wall_clock import Mint

CLIENTS = 4_000
"""In all; in ten seconds."""


async def services(run: Run, clients: int = CLIENTS) -> None:
    """Few tokens may be asked for, and honest clients, new ones too, keep theirs."""
    async with (
        MetadataServer(Mint(time.time)) as metadata,
        mesh(run.folder, metadata_host=metadata.host) as running,
    ):
        port = running.gateway.port
        began = time.monotonic()
        (outcome,), bystanders, p99_ms = await attacked(
            running, TOKEN_NAME, port, "services", TOKEN_NAMES, "--connections", clients
        )
        minutes = (time.monotonic() - began) / MINUTE_S
        most = Limits().max_new_audiences_per_source
        asked = len(metadata.requests)
        run.row(
            "tokens asked for",
            f"{clients:,} clients: {most} and as many a minute",
            f"{asked} in {outcome.seconds:.1f} s",
            passed=asked <= most + most * minutes,
        )
        others_row(run, "others", bystanders, p99_ms)
        async with beside(port, hello_for(TOKEN_NAME)) as newcomers:
            newcomers.take()
        good = sum(request.audience == "https://echo.krun.example" for request in metadata.requests)
        run.row(
            "their token",
            "asked for once, and kept",
            f"asked for {good} times; {len(newcomers.broken)} of those who came later were broken",
            passed=good == 1 and not newcomers.broken,
        )
        await nothing_left_row(run, running)

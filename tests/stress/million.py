"""A million DATA frames of one byte, which are being read, are no attack: a guard that took them for one has
ended real database connections elsewhere (ztunnel#2100)."""

from __future__ import annotations

import asyncio
import contextlib

from tests.stress import origin
from tests.stress.bystanders import Bystanders, beside
from tests.stress.clients import BrokenError, Tunnel, connect
from tests.stress.mesh import HELLO_NAME, ORIGIN_NAME, Mesh, hello_for, mesh
from tests.stress.run import Run
from tests.stress.verdict import MOST_P99_MS, TRIES, attacked, others_row, target

MILLION = 1_000_000
MILLION_S = 120.0
"""For them to come through."""


async def million(run: Run, count: int = MILLION) -> None:
    """The false positive: one-byte frames that are being read are no attack."""
    async with origin.listening(count) as port, mesh(run.folder, cloudrun=True, origin_port=port) as running:
        await _million_up(run, running, count, tls=False)
        await _million_up(run, running, count, tls=True)
        await _million_down(run, running, count)


async def _million_up(run: Run, running: Mesh, count: int, *, tls: bool) -> None:
    port, more, sni = target(running, tls=tls)
    for _ in range(TRIES):
        (outcome,), bystanders, p99_ms = await attacked(running, sni, port, "bytes", str(count), *more)
        if p99_ms <= MOST_P99_MS:
            break
    where = "TLS" if tls else "h2c"
    run.row(
        f"{where}, one-byte DATA frames up",
        f"{count:,} pass, their echo comes back, no GOAWAY",
        f"{outcome.data_bytes:,} came back in {outcome.seconds:.1f} s, "
        f"{'GOAWAY' if outcome.code is not None else 'no GOAWAY'}",
        passed=outcome.data_bytes == count and outcome.streams_ended == 1 and outcome.code is None,
    )
    others_row(run, f"{where}, others beside them", bystanders, p99_ms)


async def _million_down(run: Run, running: Mesh, count: int) -> None:
    for _ in range(TRIES):
        async with beside(running.gateway.port, hello_for(HELLO_NAME)) as bystanders:
            tunnel, took_s = await _download(running, bystanders)
            p99_ms = bystanders.p99_ms()
        if p99_ms <= MOST_P99_MS:
            break
    run.row(
        "hgate, one-byte DATA frames down",
        f"{count:,} from an origin reach the client, then its end",
        f"{len(tunnel.received):,} in {took_s:.1f} s{f', {tunnel.error}' if tunnel.error else ''}",
        passed=tunnel.received == origin.BYTE * count and tunnel.ended and tunnel.error is None,
    )
    others_row(run, "hgate, others beside them", bystanders, p99_ms)


async def _download(running: Mesh, bystanders: Bystanders) -> tuple[Tunnel, float]:
    """A tunnel from the origin when it has ended, or should have, and how many seconds it took."""
    loop = asyncio.get_running_loop()
    tunnel = await connect(running.gateway.port)
    bystanders.take()
    started = loop.time()
    tunnel.send(hello_for(ORIGIN_NAME))
    with contextlib.suppress(BrokenError):
        await tunnel.until(lambda: tunnel.ended, "the end", MILLION_S)
    took_s = loop.time() - started
    tunnel.close()
    return tunnel, took_s

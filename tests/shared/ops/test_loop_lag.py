"""A loop that was kept busy says so; one that is not has no lag to speak of."""

from __future__ import annotations

import asyncio
import time

from shared.ops import loop_lag
from shared.ops.loop_lag import LAG_INTERVAL_S, LoopLag
from tests.support.clocks import ROUNDING_S


async def next_of(seen: asyncio.Queue[float]) -> float:
    async with asyncio.timeout(10):
        return await seen.get()


async def test_a_turn_that_took_long() -> None:
    seen: asyncio.Queue[float] = asyncio.Queue()
    lag = LoopLag(seen.put_nowait)
    lag.start()
    busy_s = LAG_INTERVAL_S + 0.2
    time.sleep(busy_s)  # noqa: ASYNC251  # the very thing that is measured
    assert await next_of(seen) >= busy_s - LAG_INTERVAL_S - ROUNDING_S
    lag.close()


async def test_it_goes_on_until_it_is_closed() -> None:
    seen: asyncio.Queue[float] = asyncio.Queue()
    lag = LoopLag(seen.put_nowait)
    lag.start()
    assert min([await next_of(seen) for _ in range(3)]) < 0.2
    lag.close()
    timer = asyncio.get_running_loop().call_later(2 * LAG_INTERVAL_S, seen.put_nowait, -1.0)
    assert await next_of(seen) == -1.0, "nothing came before"
    timer.cancel()
    lag.close()


def test_the_interval_is_the_one_that_the_reference_names() -> None:
    from shared.ops.families import LOOP_LAG

    assert f"every {loop_lag.LAG_INTERVAL_S} s" in LOOP_LAG.help

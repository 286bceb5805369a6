"""Clients that come and go all the time while something is done to the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.stress.clients import BrokenError, opened, some_bytes
from tests.stress.mesh import HELLO
from tests.support.gateway_load import Load

CLIENTS = 32
"""At a time."""

MESSAGES = 3
MESSAGE_BYTES = 2000
PAUSE_S = 0.002
"""Between two messages, and two clients: the load is to be steady, not to fill the machine."""


class Traffic(Load):
    """Made by `flowing`."""

    pause_s = PAUSE_S
    faults = (BrokenError,)

    slowest_s = 0.0
    """The longest time that a client waited for its tunnel."""

    async def _visit(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        tunnel = await opened(self._port, HELLO)
        try:
            self.slowest_s = max(self.slowest_s, loop.time() - started)
            for _ in range(MESSAGES):
                await tunnel.say(some_bytes(MESSAGE_BYTES))
                await asyncio.sleep(PAUSE_S)
            tunnel.end()
            await tunnel.fin()
        finally:
            tunnel.close()

    def __str__(self) -> str:
        text = f"{self.served:,} served, {self.failed.total():,} failed, longest wait {self.slowest_s:.2f} s"
        most = "; ".join(f"{count} times {why}" for why, count in self.failed.most_common(3))
        return f"{text} ({most})" if most else text


@asynccontextmanager
async def flowing(port: int) -> AsyncIterator[Traffic]:
    """Clients of the gateway on `port` until the block ends, or `stop` is called."""
    traffic = Traffic(port, CLIENTS)
    try:
        yield traffic
    finally:
        await traffic.stop()

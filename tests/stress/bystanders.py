"""Tunnels that talk all the time beside what happens to others, and note how long each echo takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.tasks import spawn
from tests.stress.clients import BrokenError, Tunnel, opened, some_bytes
from tests.stress.figures import percentile

MESSAGE_BYTES = 64
PAUSE_S = 0.01
"""Between two messages of a tunnel."""

TUNNELS = 8
"""With the pause above some 700 echoes a second, enough for a 99th percentile of every second."""


class Bystanders:
    """Made by `beside`."""

    def __init__(self, tunnels: list[Tunnel]) -> None:
        self.broken: list[str] = []
        """What broke tunnels."""
        self._tunnels = tunnels
        self._latencies: list[float] = []
        self._stopping = False
        self._tasks = [spawn(self._talk(tunnel), name="bystander") for tunnel in tunnels]

    def take(self) -> list[float]:
        """The latencies in seconds since the last call."""
        latencies, self._latencies = self._latencies, []
        return latencies

    def p99_ms(self) -> float:
        """The 99th percentile of them in milliseconds."""
        return percentile(self.take(), 0.99) * 1000

    async def stop(self) -> None:
        """Ends all tunnels in order; one that has not the end it should have counts as broken."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _talk(self, tunnel: Tunnel) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not self._stopping:
                started = loop.time()
                await tunnel.say(some_bytes(MESSAGE_BYTES))
                self._latencies.append(loop.time() - started)
                await asyncio.sleep(PAUSE_S)
            tunnel.end()
            await tunnel.fin()
        except BrokenError as error:
            self.broken.append(str(error))
        finally:
            tunnel.close()


@asynccontextmanager
async def beside(port: int, hello: bytes, count: int = TUNNELS) -> AsyncIterator[Bystanders]:
    """Tunnels through the gateway on `port` that talk until the block ends, or `stop` is called."""
    bystanders = Bystanders([await opened(port, hello) for _ in range(count)])
    try:
        yield bystanders
    finally:
        await bystanders.stop()

"""Asking a workload for a tunnel, on a connection that it has dialled and registered its name on."""

from __future__ import annotations

import asyncio
from typing import cast

from gateway.reverse.registry import Registry
from gateway.reverse.workload_connection import WorkloadConnection
from shared.http2.events import Headers
from shared.net.http2.answers import AskedOf
from shared.net.legs.stream import Stream
from shared.ops.metrics import TunnelMetrics
from shared.tunnel.opening import Upstream
from shared.tunnel.retry import RetryRules
from shared.tunnel.tunnel_record import TunnelRecord

WORKLOAD_RULES = RetryRules(max_retries=2, max_lost=2, pauses=False)
"""A tunnel is offered to three workloads at most: one that drains, or has just died, refuses what was on its
way. What it answers is final."""


class WorkloadUpstream(Upstream):
    """The workloads that have registered a name, asked for one client's tunnel."""

    def __init__(
        self,
        registry: Registry,
        name: str,
        headers: Headers,
        record: TunnelRecord,
        metrics: TunnelMetrics,
        *,
        wait_s: float,
    ) -> None:
        """For `wait_s` seconds it waits for somebody to register the name, or to have room; this is beside
        the time for the answer. `record` gets the address of the workload that accepts the tunnel."""
        self._registry = registry
        self._name = name
        self._headers = headers
        self._record = record
        self._metrics = metrics
        self._wait_s = wait_s
        self._wait_until = asyncio.get_running_loop().time() + wait_s
        self._chosen: WorkloadConnection | None = None

    def __str__(self) -> str:
        return f"reverse {self._name}"

    @property
    def asked_of(self) -> AskedOf:
        return AskedOf(token_sent=False, in_mesh=True)

    def request_now(self) -> Stream | None:
        return self._open() if self._choose() else None

    async def prepare(self, deadline: float) -> float:
        """Raises DialError: nobody has registered the name, or nobody has room, in time."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not self._choose():
            await self._registry.wait(self._name, self._wait_until, self._wait_s)
        return loop.time() - began

    async def request(self, deadline: float) -> Stream:
        return self._open()

    def accepted(self) -> None:
        assert self._chosen is not None
        self._record.target = self._chosen.peer_name

    def retrying(self, reason: str, *, over_budget: bool = False) -> None:
        self._metrics.route(self._record.route).retried(reason)

    def _choose(self) -> bool:
        while True:
            found = self._registry.best(self._name)
            if found is None:
                return False
            connection = self._chosen = cast("WorkloadConnection", found.connection)
            if connection.expiry is None or connection.expiry.allows_stream():
                return True  # else it has lost its name by being asked

    def _open(self) -> Stream:
        assert self._chosen is not None
        return self._chosen.open(self._headers)

"""The ports for operators: admin, metrics and health.

Each port has connection slots of its own, and answers one request in a turn of the event loop. So probes are
answered during a flood on another port, and during a flood of incomplete requests on their own. The admin
port shows who talks to whom, so it refuses requests that a web page may have made.

A successor that starts on the same machine listens on the same ports (SO_REUSEPORT). While both serve, either
may get a request. During our drain only the successor should: its readiness is the machine's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterator, Mapping
from typing import TYPE_CHECKING

from gateway.config.config import GatewayConfig
from shared.address import Address
from shared.net.listen_close import listening_on
from shared.ops.http_server import Handler, HttpServer, Request, Response
from shared.ops.port_metrics import port_families
from shared.tasks import spawn

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("hbone.gateway")

SUCCESSOR_LOOK_S = 1.0
"""Seconds between two checks for a successor during a drain; a check takes microseconds."""

RECENT_S = 60.0
"""Seconds. A probe that has come within them will come again: probes come every few seconds."""


class OpsPorts:
    """The admin, metrics and health ports."""

    def __init__(
        self,
        *,
        ready: Handler,
        live: Handler,
        scrape: Handler,
        admin: Mapping[str, Handler],
        changes: Mapping[str, Handler] | None = None,
    ) -> None:
        """`admin` has the handlers of the admin port, by path; they change nothing. `changes` has those for
        POST."""
        self._ready = ready
        self._asked_at: float | None = None
        self._servers: dict[Address, HttpServer] = {}
        self._leaving: asyncio.Task[None] | None = None
        self._health = HttpServer(
            {("GET", "/healthz/ready"): self.ready, ("GET", "/healthz/live"): live},
            name="health",
        )
        self._metrics = HttpServer(
            {("GET", "/metrics"): scrape, ("GET", "/stats/prometheus"): scrape}, name="metrics"
        )
        self._admin = HttpServer(
            {
                **{("GET", path): handler for path, handler in admin.items()},
                **{("POST", path): handler for path, handler in (changes or {}).items()},
            },
            name="admin",
            local_only=True,
        )

    async def start(self, config: GatewayConfig) -> None:
        """Serves on the ports of `config`. Raises UnavailableError if one cannot be had."""
        for server, address in (
            (self._health, config.health),
            (self._metrics, config.metrics),
            (self._admin, config.admin),
        ):
            if address is not None:
                bound = await server.start(address, shared=True)
                self._servers[bound] = server
                log.info("%s on %s", server.name, bound)

    def families(self) -> Iterator[Metric]:
        """The metrics about the ports themselves."""
        return port_families((self._health, self._metrics, self._admin))

    @property
    def readiness_is_asked_for(self) -> bool:
        """Whether the readiness was asked for within RECENT_S."""
        now = asyncio.get_running_loop().time()
        return self._asked_at is not None and now - self._asked_at < RECENT_S

    def ready(self, request: Request) -> Response | Awaitable[Response]:
        """Answers a request for the readiness, which came here or to the ops process of several workers."""
        self._asked_at = asyncio.get_running_loop().time()
        return self._ready(request)

    def leave_to_successor(self) -> None:
        """From now on closes each port as soon as another process listens on it, too."""
        if self._leaving is None:
            self._leaving = spawn(self._leave(), name="leave the ports to a successor")

    async def close(self) -> None:
        """Closes all of them."""
        if self._leaving is not None:
            self._leaving.cancel()
        for server in self._servers.values():
            await server.close()

    async def _leave(self) -> None:
        while self._servers:
            for address, server in list(self._servers.items()):
                if listening_on(address) > 1:
                    del self._servers[address]
                    await server.close()
                    log.info("%s on %s is left to the other process that listens there", server.name, address)
            await asyncio.sleep(SUCCESSOR_LOOK_S)

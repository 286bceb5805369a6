"""krun's ports for operators: health, metrics and admin, which is on loopback and answers no web page.

A default port that is in use, by a second krun of the instance or by pilot-agent of the image's own, does not
keep krun from starting; one that somebody has named does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from agent.config import settings as defaults
from agent.config.settings import Settings
from shared.address import Address
from shared.errors import UnavailableError
from shared.ops.http_server import Handler, HttpServer
from shared.ops.port_metrics import port_families

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("hbone.agent")


class OpsPorts:
    """The three."""

    def __init__(
        self, *, ready: Handler, live: Handler, scrape: Handler, admin: Mapping[str, Handler]
    ) -> None:
        """`admin` has the handlers of the admin port, by path."""
        self._health = HttpServer(
            {("GET", "/healthz/ready"): ready, ("GET", "/healthz/live"): live}, name="health"
        )
        self._metrics = HttpServer(
            {("GET", "/metrics"): scrape, ("GET", "/stats/prometheus"): scrape}, name="metrics"
        )
        self._admin = HttpServer(
            {("GET", path): handler for path, handler in admin.items()}, name="admin", local_only=True
        )

    async def start(self, settings: Settings) -> None:
        """Serves where `settings` say. Raises UnavailableError if a port that they name cannot be had."""
        for server, address, default in (
            (self._health, settings.health, defaults.DEFAULT_HEALTH),
            (self._metrics, settings.metrics, defaults.DEFAULT_METRICS),
            (self._admin, settings.admin, defaults.DEFAULT_ADMIN),
        ):
            if address is not None:
                await _start(server, address, default)

    def families(self) -> Iterator[Metric]:
        """The metrics about the ports themselves."""
        return port_families((self._health, self._metrics, self._admin))

    async def close(self) -> None:
        """Closes all of them."""
        for server in (self._health, self._metrics, self._admin):
            await server.close(0)


async def _start(server: HttpServer, address: Address, default: Address) -> None:
    try:
        log.info("%s on %s", server.name, await server.start(address))
    except UnavailableError as error:
        if address != default:
            raise
        log.warning(
            "no %s port: %s: set HBONE_%s to another, or to -", server.name, error, server.name.upper()
        )

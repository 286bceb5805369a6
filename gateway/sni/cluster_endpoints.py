"""The endpoints of the cluster's Services, for connections that are passed to one of them as they are.

The process at the API server writes the list; here it is followed. Reading 10,000 endpoints takes 5 ms, in a
thread, and at most once a second.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from pathlib import Path

from gateway.config import cluster_files
from gateway.rules.cluster_rules import Endpoints
from shared.address import Address
from shared.errors import DialError, UnavailableError
from shared.net.dial import dial_socket
from shared.tasks import spawn
from shared.watched_file import WatchedFiles

log = logging.getLogger("hbone.gateway")

WATCH_S = 1.0
"""Seconds between two looks at the file."""

MAX_TRIED = 3
"""Endpoints of one Service that a connection tries: one that has just gone is still in the list."""


class ClusterEndpoints:
    """The endpoints as they were handed over last; none until `follow`."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._services: Endpoints = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        """How many Services are known."""
        return len(self._services)

    async def follow(self, folder: Path | None) -> None:
        """From now on follows the list in `folder`, which is read first; None: there are no endpoints."""
        if folder == self._folder:
            return
        self.close()
        self._folder, self._services = folder, {}
        if folder is not None:
            file = WatchedFiles([folder / cluster_files.ENDPOINTS])
            await self._look(file, folder)
            self._task = spawn(self._follow(file, folder), name="follow the cluster's endpoints")

    def close(self) -> None:
        """Follows it no longer."""
        if self._task is not None:
            self._task.cancel()

    async def dial(self, service: Address, timeout_s: float) -> tuple[Address, socket.socket]:
        """Connects to an endpoint of `service`, a Service's name and port, chosen by chance: the next one is
        tried when one refuses. All attempts together take `timeout_s` seconds at most. Returns the endpoint
        and the bare socket, the caller's to close.

        Raises:
            DialError: no endpoint is ready, or none of those that were tried could be connected.
        """
        found = self._services.get(service.host, {}).get(str(service.port), ())
        if not found:
            raise DialError(
                f"connect to {service}: the cluster has no ready endpoint for this Service and port"
            )
        tried = [Address.parse(one) for one in random.sample(found, min(MAX_TRIED, len(found)))]
        errors = []
        for endpoint in tried:
            try:
                return endpoint, await dial_socket(endpoint, timeout_s / len(tried))
            except DialError as error:
                errors.append(str(error))
        raise DialError(f"{service}: {'; '.join(errors)}")

    async def _follow(self, file: WatchedFiles, folder: Path) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            await self._look(file, folder)

    async def _look(self, file: WatchedFiles, folder: Path) -> None:
        """Reads the list if it has changed."""
        if await asyncio.to_thread(file.changed):
            file.note()
            try:
                self._services = await asyncio.to_thread(cluster_files.read_endpoints, folder)
            except UnavailableError as error:
                log.error("%s; the endpoints stay as they are", error)

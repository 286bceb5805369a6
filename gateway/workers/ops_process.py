"""The process beside several workers that serves one admin, one metrics and one health port for all of them.

It carries no tunnel, so it answers while the workers are busy; and it has no state that its replacement
needs, should it die.

Ready: all workers are. Alive: all workers answer. Metrics: their sum. Tunnels, connections and certificates:
their lists, with the worker's number. The page: their parts as one. A reload, and a log level, reach all
workers. Requests for the same thing share one response while it is being made, so that a flood of them does
not become a flood of requests to the workers, which would drown those of a probe.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gateway.config.config import GatewayConfig
from gateway.config.reload import ConfigFile, Reloads, keep_fixed
from gateway.ops import admin, log_level, overview, page
from gateway.ops.ops_ports import OpsPorts
from gateway.ops.versions import log_versions
from gateway.traces.exporting import Exporting
from gateway.workers import metric_sums
from gateway.workers.worker_link import LinkClient, watch_parent
from shared.errors import EXIT_OK, UpstreamError, UsageError
from shared.ops import families, metrics
from shared.ops.http_server import Request, Response
from shared.tasks import spawn

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("hbone.gateway")

RESPONSE_S = 2.0
"""Seconds for a worker to respond: one turn of a busy event loop takes milliseconds. Less than the deadline
of probes."""

RELOAD_S = 50.0
"""Seconds for a worker to read the file again: it takes 0.3 s for 1,000 routes, if it has a CPU."""

START_POLL_S = 0.1
"""Seconds between two checks whether the workers are ready for the first time."""


class OpsProcess:
    """The running process."""

    def __init__(
        self,
        config_file: Path,
        workers: Sequence[LinkClient],
        parent_pipe: int,
        *,
        is_replacement: bool = False,
        exporting: Exporting | None = None,
    ) -> None:
        """`parent_pipe` is a pipe whose other end closes when the parent is gone. A replacement may have
        missed a change of the file. `exporting` takes the spans of all workers, if traces are made. Raises
        ConfigError if the file has a mistake."""
        file = ConfigFile(config_file)
        self._config = file.read()
        self._workers = workers
        self._parent_pipe = parent_pipe
        self._is_replacement = is_replacement
        self._exporting = exporting
        self._reloads = Reloads(file, self._apply)
        self._sums = metric_sums.Sums()
        self._making: dict[str, asyncio.Task[Response]] = {}
        self._stop = asyncio.Event()
        self._draining = False
        self._is_ready = False
        """As of the last scrape."""
        self._ports = OpsPorts(
            ready=lambda _: self._shared("/ready", self._ready),
            live=lambda _: self._shared("/live", self._live),
            scrape=self._scrape,
            admin={
                **page.handlers(),
                "/overview": self._show_overview,
                "/config": lambda _: admin.config(self._config),
                "/config_dump": lambda _: self._shared("/config_dump", self._config_dump),
                **{path: self._shared_lists for path in ("/tunnels", "/connections", "/certs", "/tokens")},
                log_level.PATH: self._log_levels,
            },
            changes={log_level.PATH: self._change_log_level},
        )

    async def run(self) -> int:
        """Serves until SIGQUIT, or until the parent is gone; returns the exit code.

        SIGTERM and SIGINT only mean that the workers drain. Raises UnavailableError if a port cannot be had.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain)
        loop.add_signal_handler(signal.SIGQUIT, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reloads.request)
        watch_parent(self._parent_pipe, self._stop)
        try:
            await self._ports.start(self._config)
            if self._exporting is not None:
                self._exporting.start()
            self._reloads.watch()
            if self._is_replacement or self._config.cluster is not None:
                # Each process has read the cluster's routes by itself, and they may have come in between.
                self._reloads.request()
            if not self._is_replacement:
                log_versions()
            waiting = spawn(self._log_when_ready(), name="wait for the workers")
            await self._stop.wait()
            waiting.cancel()
        finally:
            self._reloads.close()
            await self._ports.close()
            if self._exporting is not None:
                await self._exporting.close()
        return EXIT_OK

    def _drain(self) -> None:
        self._draining = True
        self._reloads.close()
        self._ports.leave_to_successor()

    async def _log_when_ready(self) -> None:
        while not self._draining:
            if not _failed(await self._get_all("/started")):
                log.info("all %d workers are ready", len(self._workers))
                return
            await asyncio.sleep(START_POLL_S)

    async def _apply(self, config: GatewayConfig) -> None:
        """Has all workers apply the file. Raises UpstreamError if one of them has not."""
        responses = await self._get_all("/reload", RELOAD_S)
        if failed := _failed(responses):
            raise UpstreamError("; ".join(failed))
        self._config = keep_fixed(self._config, config)

    # Responses.

    async def _shared(self, key: str, make: Callable[[], Coroutine[Any, Any, Response]]) -> Response:
        """The response for `key` that is being made, or else that of `make`."""
        making = self._making.get(key)
        if making is None:
            making = spawn(make(), name=f"answer {key}")
            making.add_done_callback(lambda _: self._making.pop(key))
            self._making[key] = making
        return await asyncio.shield(making)  # if one client goes, the others still want it

    def _shared_lists(self, request: Request) -> Awaitable[Response]:
        return self._shared(request.path, lambda: self._lists(request.path))

    async def _get_all(self, path: str, timeout_s: float = RESPONSE_S) -> dict[int, Response | UpstreamError]:
        """What each worker responds, by its number."""

        async def get(worker: LinkClient) -> Response | UpstreamError:
            try:
                return await worker.get(path, timeout_s)
            except UpstreamError as error:
                return error

        tasks = [spawn(get(worker), name=f"ask worker {worker.number}") for worker in self._workers]
        return dict(
            zip((worker.number for worker in self._workers), await asyncio.gather(*tasks), strict=True)
        )

    async def _ready(self) -> Response:
        if self._draining:
            return Response.text(503, "draining")
        failed = _failed(await self._get_all("/ready"))
        return Response.text(503, "; ".join(failed)) if failed else Response.text(200, "ready")

    async def _live(self) -> Response:
        failed = _failed(await self._get_all("/live"))
        return Response.text(503, "; ".join(failed)) if failed else Response.text(200, "alive")

    async def _lists(self, path: str) -> Response:
        rows: list[object] = []
        for number, response in (await self._get_all(path)).items():
            if isinstance(response, UpstreamError):
                log.warning("%s", response)
            else:
                rows += [{"worker": number} | row for row in json.loads(response.body)]
        return Response.json(rows)

    def _show_overview(self, request: Request) -> Awaitable[Response]:
        find = overview.wanted(request)
        path = f"/overview?find={quote(find)}" if find else "/overview"
        return self._shared(path, lambda: self._overview(path))

    async def _overview(self, path: str) -> Response:
        parts: dict[int, overview.Part] = {}
        silent: list[str] = []
        for number, response in (await self._get_all(path)).items():
            if isinstance(response, UpstreamError):
                silent.append(str(response))
            else:
                parts[number] = json.loads(response.body)
        return overview.shown(
            parts,
            workers=len(self._workers),
            silent=silent,
            reload_is_good=self._reloads.last_succeeded,
        )

    async def _config_dump(self) -> Response:
        """A worker's: all have the same, and only they know the routes of the cluster."""
        error = UpstreamError("there is no worker")
        for worker in self._workers:
            try:
                return await worker.get("/config_dump", RESPONSE_S)
            except UpstreamError as no_response:
                error = no_response
        raise error

    async def _log_levels(self, request: Request) -> Response:
        responses = await self._get_all(log_level.PATH)
        levels = {
            number: str(said) if isinstance(said, UpstreamError) else said.body.decode().strip()
            for number, said in responses.items()
        }
        return log_level.shown(request, levels)

    async def _change_log_level(self, request: Request) -> Response:
        """Changes that of all workers, and ours; 503 if one of them does not answer."""
        try:
            level = log_level.asked(request)
        except UsageError as error:
            return Response.text(400, str(error))
        log_level.use(level)
        failed = _failed(await self._get_all(f"{log_level.PATH}/{level}"))
        return Response.text(503, "; ".join(failed)) if failed else Response.text(200, level)

    # Metrics.

    def _scrape(self, request: Request) -> Awaitable[Response]:
        media_type = metrics.format_of(request.headers.get("accept", ""))
        return self._shared(f"/metrics {media_type}", lambda: self._scraped(media_type))

    async def _scraped(self, media_type: str) -> Response:
        for number, response in (await self._get_all("/metrics")).items():
            if isinstance(response, UpstreamError):
                log.warning("%s", response)
                self._sums.no_response(number)
            else:
                families = metric_sums.decode(response.body)
                self._sums.update(number, int(response.content_type), families)
        # Not asked as a probe asks: who is probed waits for the probes to see the start of a drain.
        self._is_ready = not self._draining and not _failed(await self._get_all("/started"))
        return Response(200, *metrics.render(metrics.Scrape(self._families), media_type))

    def _families(self) -> Iterator[Metric]:
        yield from self._sums.collect()
        yield from self._reloads.families()
        yield from self._ports.families()
        if self._exporting is not None:
            yield from self._exporting.families()
        yield families.READY.value(self._is_ready)
        yield families.WORKERS.value(len(self._workers))
        yield families.WORKER_RESTARTS.value(self._sums.restarts)


def _failed(responses: dict[int, Response | UpstreamError]) -> list[str]:
    """The errors of the workers that have not responded, or not with 200."""
    failed: list[str] = []
    for number, response in responses.items():
        if isinstance(response, UpstreamError):
            failed.append(str(response))
        elif response.status != 200:
            failed.append(f"worker {number}: {response.body.decode().strip()}")
    return failed

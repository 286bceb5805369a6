"""What several workers tell together: one admin, one metrics and one health port for all of them.

Owned here: asking every worker and making one answer of theirs, and that a reload reaches all. How one is
asked is `worker_link.py`'s, the sums of their metrics `metric_sums.py`'s, the processes `parent.py`'s. It
carries no tunnel, so it answers while they are busy, and if it dies its replacement knows what it has to
know.

Ready: all workers are. Alive: all workers answer. Metrics: their sum. Tunnels, connections and certificates:
their lists, with the worker's number. Requests for the same thing share one answer as long as it is being
made, so that a flood of them is no flood of questions, among which a probe's would be lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.config.config import GatewayConfig
from gateway.config.reload import ConfigFile, Reloads, keep_fixed
from gateway.ops import admin
from gateway.ops.ops_ports import OpsPorts
from gateway.workers import metric_sums
from gateway.workers.worker_link import Asker, hold
from shared.errors import EXIT_OK, UpstreamError
from shared.ops import families, metrics
from shared.ops.http_server import Request, Response
from shared.tasks import spawn

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("hbone.gateway")

ANSWER_S = 2.0
"""For a worker to answer: a busy loop's turn takes milliseconds. Below the deadline of whoever asks us."""

RELOAD_S = 50.0
"""For a worker to read the file again: 0.3 s for 1,000 routes, if it has a CPU."""

START_LOOK_S = 0.1
"""Between two looks whether the workers are ready, until they are for the first time."""


class Front:
    """The running front."""

    def __init__(
        self, config_file: Path, askers: Sequence[Asker], lifeline: int, *, is_replacement: bool = False
    ) -> None:
        """`lifeline` is a pipe whose other end closes when the parent is gone; a replacement may have missed
        a change of the file. Raises ConfigError if the file has a mistake."""
        file = ConfigFile(config_file)
        self._config = file.read()
        self._askers = askers
        self._lifeline = lifeline
        self._is_replacement = is_replacement
        self._reloads = Reloads(file, self._apply)
        self._sums = metric_sums.Sums()
        self._making: dict[str, asyncio.Task[Response]] = {}
        self._stop = asyncio.Event()
        self._draining = False
        self._ports = OpsPorts(
            ready=lambda _: self._shared("/ready", self._ready),
            live=lambda _: self._shared("/live", self._live),
            scrape=self._scrape,
            config=lambda _: admin.config(self._config),
            tunnels=lambda _: self._shared_lists("/tunnels"),
            connections=lambda _: self._shared_lists("/connections"),
            certificates=lambda _: self._shared_lists("/certs"),
            tokens=lambda _: self._shared_lists("/tokens"),
        )

    async def run(self) -> int:
        """Serves until SIGQUIT ends it, or the parent's end; returns the exit code.

        SIGTERM and SIGINT only say that the workers drain. Raises UnavailableError if a port cannot be had.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain)
        loop.add_signal_handler(signal.SIGQUIT, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reloads.request)
        hold(self._lifeline, self._stop)
        try:
            await self._ports.start(self._config)
            self._reloads.watch()
            if self._is_replacement:
                self._reloads.request()
            looking = spawn(self._say_when_ready(), name="wait for the workers")
            await self._stop.wait()
            looking.cancel()
        finally:
            self._reloads.close()
            await self._ports.close()
        return EXIT_OK

    def _drain(self) -> None:
        self._draining = True
        self._reloads.close()
        self._ports.leave_to_successor()

    async def _say_when_ready(self) -> None:
        while not self._draining:
            if not _failed(await self._ask_all("/started")):
                log.info("all %d workers are ready", len(self._askers))
                return
            await asyncio.sleep(START_LOOK_S)

    async def _apply(self, config: GatewayConfig) -> None:
        """Raises UpstreamError if a worker has not put the file into effect."""
        answers = await self._ask_all("/reload", RELOAD_S)
        if failed := _failed(answers):
            raise UpstreamError("; ".join(failed))
        self._config = keep_fixed(self._config, config)

    # Answers.

    async def _shared(self, what: str, make: Callable[[], Coroutine[Any, Any, Response]]) -> Response:
        """The answer to `what` that is being made, else that of `make`."""
        making = self._making.get(what)
        if making is None:
            making = spawn(make(), name=f"answer {what}")
            making.add_done_callback(lambda _: self._making.pop(what))
            self._making[what] = making
        return await asyncio.shield(making)  # if one client goes, the others still want it

    def _shared_lists(self, path: str) -> Awaitable[Response]:
        return self._shared(path, lambda: self._lists(path))

    async def _ask_all(self, path: str, timeout_s: float = ANSWER_S) -> dict[int, Response | UpstreamError]:
        """What each worker answers, by its number."""

        async def ask(asker: Asker) -> Response | UpstreamError:
            try:
                return await asker.ask(path, timeout_s)
            except UpstreamError as error:
                return error

        asking = [spawn(ask(asker), name=f"ask worker {asker.number}") for asker in self._askers]
        return dict(zip((asker.number for asker in self._askers), await asyncio.gather(*asking), strict=True))

    async def _ready(self) -> Response:
        if self._draining:
            return Response.text(503, "draining")
        failed = _failed(await self._ask_all("/ready"))
        return Response.text(503, "; ".join(failed)) if failed else Response.text(200, "ready")

    async def _live(self) -> Response:
        failed = _failed(await self._ask_all("/live"))
        return Response.text(503, "; ".join(failed)) if failed else Response.text(200, "alive")

    async def _lists(self, path: str) -> Response:
        rows: list[object] = []
        for number, answer in (await self._ask_all(path)).items():
            if isinstance(answer, UpstreamError):
                log.warning("%s", answer)
            else:
                rows += [{"worker": number} | row for row in json.loads(answer.body)]
        return admin.as_json(rows)

    # Metrics.

    def _scrape(self, request: Request) -> Awaitable[Response]:
        media_type = metrics.format_of(request.headers.get("accept", ""))
        return self._shared(f"/metrics {media_type}", lambda: self._scraped(media_type))

    async def _scraped(self, media_type: str) -> Response:
        for number, answer in (await self._ask_all("/metrics")).items():
            if isinstance(answer, UpstreamError):
                log.warning("%s", answer)
                self._sums.silent(number)
            else:
                families = metric_sums.decode(answer.body)
                self._sums.heard(number, int(answer.content_type), families)
        return Response(200, *metrics.render(metrics.Scrape(self._families), media_type))

    def _families(self) -> Iterator[Metric]:
        yield from self._sums.collect()
        yield from self._reloads.families()
        yield from self._ports.families()
        yield families.WORKERS.value(len(self._askers))
        yield families.WORKER_RESTARTS.value(self._sums.restarts)


def _failed(answers: dict[int, Response | UpstreamError]) -> list[str]:
    """What those say that do not answer, or not with 200."""
    failed: list[str] = []
    for number, answer in answers.items():
        if isinstance(answer, UpstreamError):
            failed.append(str(answer))
        elif answer.status != 200:
            failed.append(f"worker {number}: {answer.body.decode().strip()}")
    return failed

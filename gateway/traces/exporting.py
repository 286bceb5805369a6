"""The exporting process, seen from hgate: started, listened to, started again if it dies, ended.

A process of its own, as the SDK would cost each worker 30 MiB, a thread, and turns of the interpreter that
tunnels would wait for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from gateway.traces.spans import SpanPipe
from gateway.traces.trace_settings import SERVICE_NAME, TraceSettings
from shared.backoff import doubled_s
from shared.ops import families
from shared.ops.repeated_log import RepeatedLog
from shared.tasks import spawn

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("hbone.traces")

MODULE = "gateway.traces.exporter"

FIRST_DELAY_S = 1.0
MAX_DELAY_S = 60.0
"""Seconds before it is started again: it takes half a second of a CPU to start."""

LAST_SPANS_S = 1.0
"""For its last batches at our end; a collector answers in milliseconds. What is not exported then is lost.
With the drain, and the last bytes of tunnels, this is still less than Kubernetes' 30 seconds."""


class Exporting:
    """All calls are made on the event loop's thread."""

    def __init__(self, settings: TraceSettings, pipe: SpanPipe, environ: Mapping[str, str]) -> None:
        """`pipe` has the spans, and stays the caller's to close."""
        self.exported = 0
        self.failed = 0
        """Spans of tunnels so far."""
        self._settings = settings
        self._pipe = pipe
        self._environ = {"OTEL_SERVICE_NAME": SERVICE_NAME} | {k: v for k, v in environ.items() if v}
        self._process: Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._repeated = RepeatedLog(log)

    def start(self) -> None:
        """Starts the process, which takes half a second until it exports."""
        log.info("traces go to %s", self._settings.endpoint)
        self._task = spawn(self._run(), name="traces")

    async def close(self) -> None:
        """Has the process export what there is, for at most LAST_SPANS_S, and end."""
        if self._task is None:
            return
        self._closing.set()
        self._pipe.end()
        done, _ = await asyncio.wait({self._task}, timeout=LAST_SPANS_S)
        if not done and self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await asyncio.wait({self._task}, timeout=LAST_SPANS_S)
        self._task.cancel()
        self._repeated.close()

    def families(self) -> Iterator[Metric]:
        """The metric about it."""
        yield families.TRACE_SPANS.metric((("success", self.exported), ("failure", self.failed)))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while not self._closing.is_set():
            began = loop.time()
            try:
                process = self._process = await self._spawned()
            except OSError as error:
                how = f"cannot be started: {error}"
            else:
                assert process.stdout is not None
                await self._listen(process.stdout)
                how = f"ended with exit code {await process.wait()}"
                self._process = None
            if self._closing.is_set():
                return
            failures = 0 if loop.time() - began > MAX_DELAY_S else failures + 1
            delay_s = doubled_s(FIRST_DELAY_S, MAX_DELAY_S, max(0, failures - 1))
            log.warning("traces: the exporting process %s; a new one starts in %g s", how, delay_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._closing.wait()

    async def _spawned(self) -> Process:
        # -P: no module of the folder that we were started in. A session of its own: a terminal's signals are
        # ours to pass on.
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", MODULE),
            env=self._environ,
            stdin=self._pipe.read_end,
            stdout=PIPE,
            stderr=DEVNULL,
            start_new_session=True,
        )

    async def _listen(self, reports: asyncio.StreamReader) -> None:
        while line := await reports.readline():
            try:
                report = json.loads(line)
                self.exported += int(report.get("exported", 0))
                self.failed += int(report.get("failed", 0))
                why = str(report.get("why", ""))
            except (ValueError, AttributeError, TypeError):
                continue  # cut off by its death
            if why:
                self._repeated.warning("export", f"traces to {self._settings.endpoint}: {why}")

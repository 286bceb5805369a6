"""hgate as a process of its own: its ports, its log, what its ports tell."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from shared.errors import DialError, UpstreamError
from shared.net import http1
from shared.tasks import spawn
from tests.support.gateway_output import answer_of
from tests.support.process import Process, started
from tests.support.tcp_peer import PATIENCE_S


class Hgate:
    """Made by `hgate`."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.pid = process.pid
        self.lines: list[dict[str, Any]] = []
        """Its access log so far."""
        self.port = 0
        self._ports: dict[str, int] = {}
        self._reading = spawn(self._read(), name="read the access log")

    # What it says.

    async def said(self, pattern: str) -> re.Match[str]:
        """The first message in which `pattern` is found, past or to come."""
        for message in self.process.messages:
            if match := re.search(pattern, message):
                return match
        return await self.process.said(pattern)

    async def get(self, server: str, path: str) -> http1.Response:
        """An answer of `health`, `metrics` or `admin`."""
        if server not in self._ports:
            self._ports[server] = int((await self.said(rf"^{server} on 127\.0\.0\.1:(\d+)$"))[1])
        return await answer_of(server, self._ports[server], path)

    async def dump(self, path: str) -> Any:
        """A dump of the admin port."""
        return json.loads((await self.get("admin", path)).body)

    async def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """The values of a metric by its labels' values."""
        text = (await self.get("metrics", "/metrics")).body.decode()
        return {
            tuple(sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }

    async def metric(self, name: str, *labels: str) -> float:
        """The value of a metric; 0 if there is no such sample yet."""
        return (await self.samples(name)).get(labels, 0.0)

    async def until_ready(self) -> None:
        """Returns when its readiness port says so."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self.is_ready():
                pass

    async def is_ready(self) -> bool:
        """Whether its readiness port says so."""
        try:
            return (await self.get("health", "/healthz/ready")).status == 200
        except (DialError, UpstreamError):
            return False

    # Its end.

    async def ended(self) -> int:
        """Its exit code, once it has ended by itself."""
        await self.stop_reading()
        code, out, err = await self.process.ended()
        self.lines += [json.loads(line) for line in out.splitlines()]
        self.process.messages += [_message(line) for line in err.splitlines()]
        return code

    async def stop_reading(self) -> None:
        """Leaves the access log to somebody else."""
        self._reading.cancel()
        await asyncio.wait({self._reading})

    async def _read(self) -> None:
        while line := await self.process.stdout.readline():
            self.lines.append(json.loads(line))


@asynccontextmanager
async def hgate(
    file: Path, *arguments: str, environ: Mapping[str, str] | None = None
) -> AsyncIterator[Hgate]:
    """hgate with this file, ready, until the block ends; `environ` is added to our own."""
    command = ("gateway", "--config", str(file), "--log-format", "json", *arguments)
    async with started(*command, environ=environ) as process:
        running = Hgate(process)
        running.port = int((await running.said(r"^listening on 127\.0\.0\.1:(\d+)$"))[1])
        await running.said(r"^all \d+ workers are ready$" if "--workers" in arguments else "^ready$")
        try:
            yield running
        finally:
            await running.stop_reading()


def _message(line: str) -> str:
    return str(json.loads(line)["message"]) if line.startswith("{") else line

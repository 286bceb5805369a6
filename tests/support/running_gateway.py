"""The gateway in this process, on free loopback ports, with its access log and metrics at hand.

All of it is the real thing, signals included; only its end is not that of a process (test_cli.py has that).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gateway.app import Gateway
from shared.errors import HboneError
from shared.net import http1
from shared.tasks import spawn
from tests.support.gateway_output import AccessLines, Line, access_lines, answer_of, value_of
from tests.support.last_bytes import last_bytes_are_gone
from tests.support.tcp_peer import PATIENCE_S, TcpPeer


class Records(logging.Handler):
    """Keeps what the `hbone` loggers say, as long as the block lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self._changed = asyncio.Event()
        self._logger = logging.getLogger("hbone")

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self._changed.set()

    async def match(self, pattern: str) -> re.Match[str]:
        """The first message, past or to come, in which `pattern` is found."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self._changed.clear()
                for message in self.messages:
                    if match := re.search(pattern, message):
                        return match
                await self._changed.wait()

    async def count(self, pattern: str, wanted: int) -> None:
        """Returns once `pattern` is found in so many messages."""
        async with asyncio.timeout(PATIENCE_S):
            while sum(bool(re.search(pattern, message)) for message in self.messages) < wanted:
                self._changed.clear()
                await self._changed.wait()

    def __enter__(self) -> Records:
        self._level = self._logger.level
        self._logger.setLevel(logging.DEBUG)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


class RunningGateway:
    """Made by `running`."""

    def __init__(self, file: Path, records: Records, lines: AccessLines) -> None:
        self.records = records
        self.port = 0
        self.file = file
        """Its configuration."""
        self._task: asyncio.Task[int]
        self._ports: dict[str, int] = {}
        self._lines = lines
        self._clients: list[TcpPeer] = []

    # Clients.

    async def client(self, first: bytes = b"") -> TcpPeer:
        """A connection to the gateway, on which `first` has been sent."""
        client = await TcpPeer.connect(self.port)
        self._clients.append(client)
        if first:
            client.send_soon(first)
        return client

    # What it tells.

    async def line(self) -> Line:
        """The next line of the access log."""
        return await self._lines.next()

    async def get(self, server: str, path: str) -> http1.Response:
        """An answer of `health`, `metrics` or `admin`."""
        return await answer_of(server, self._ports[server], path)

    async def dump(self, path: str) -> Any:
        """A dump of the admin port."""
        return json.loads((await self.get("admin", path)).body)

    async def metric(self, name: str, **labels: str) -> float:
        """The value of a metric; 0 if there is no such sample yet."""
        text = (await self.get("metrics", "/metrics")).body.decode()
        return value_of(text_string_to_metric_families(text), name, labels)

    async def until_open(self, count: int) -> None:
        """Returns when so many connections are open."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.metric("hbone_connections_open") != count:
                pass

    async def refused(self) -> dict[str, float]:
        """How many connections were turned away, by flag; none that is 0."""
        text = (await self.get("metrics", "/metrics")).body.decode()
        return {
            sample.labels["flags"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "hbone_connections_refused_total" and sample.value
        }

    async def lines(self) -> list[Line]:
        """All further lines, once the gateway has ended."""
        return await self._lines.rest()

    # Signals: it has asked for them, so they do not end the tests.

    def reload(self) -> None:
        """Sends SIGHUP."""
        os.kill(os.getpid(), signal.SIGHUP)

    async def reloaded(self, routes: Collection[Mapping[str, Any]], **limits: Any) -> None:
        """Returns once these routes and limits, the first that are so many, are in effect."""
        write_config(self.file, routes, **limits)
        self.reload()
        await self.records.match(f"^reload: {len(routes)} routes from ")

    def terminate(self) -> None:
        """Sends SIGTERM."""
        os.kill(os.getpid(), signal.SIGTERM)

    def interrupt(self) -> None:
        """Sends SIGINT."""
        os.kill(os.getpid(), signal.SIGINT)

    async def exit_code(self) -> int:
        """Returns when it has ended by itself."""
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.shield(self._task)

    # Start and end.

    async def _start(self, gateway: Gateway) -> None:
        task = self._task = spawn(gateway.run(), name="gateway")
        ready = spawn(self.records.match("^ready$"), name="wait for the gateway")
        await asyncio.wait({ready, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            ready.cancel()
            task.result()
        await ready
        self.port = int((await self.records.match(r"listening on 127\.0\.0\.1:(\d+)"))[1])
        for server in ("health", "metrics", "admin"):
            self._ports[server] = int((await self.records.match(rf"{server} on 127\.0\.0\.1:(\d+)"))[1])

    async def _close(self) -> None:
        for client in self._clients:
            await client.close()
        self._task.cancel()
        with suppress(asyncio.CancelledError, HboneError):
            await self._task
        await last_bytes_are_gone()


def write_config(
    file: Path, routes: Iterable[Mapping[str, Any]], hbone: Mapping[str, Any] | None = None, **limits: Any
) -> None:
    """Writes the gateway's file: free loopback ports, these routes, this HBONE port, if any, and limits. JSON
    is YAML, too."""
    config: dict[str, Any] = {
        "listen": ["127.0.0.1:0"],
        "admin": "127.0.0.1:0",
        "metrics": "127.0.0.1:0",
        "health": "127.0.0.1:0",
        "routes": list(routes),
        "limits": limits,
        **({"hbone": {"listen": ["127.0.0.1:0"], **hbone}} if hbone else {}),
    }
    file.write_text(json.dumps(config, indent=1))


def change_config(file: Path, **fields: Any) -> None:
    """Sets fields of a gateway's file that `write_config` has written."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@asynccontextmanager
async def running(
    file: Path,
    routes: Iterable[Mapping[str, Any]],
    *,
    environ: Mapping[str, str] | None = None,
    wall_clock: Callable[[], float] = time.time,
    **limits: Any,
) -> AsyncIterator[RunningGateway]:
    """A gateway with these routes and limits until the block ends; then it is stopped without a drain. Its
    tokens live by `wall_clock`."""
    write_config(file, routes, **limits)
    async with access_lines() as lines:
        with Records() as records:
            gateway = RunningGateway(file, records, lines)
            try:
                await gateway._start(Gateway(file, environ or {}, lines.log, wall_clock=wall_clock))
                yield gateway
            finally:
                await gateway._close()

"""What a gateway tells: lines of its access log, answers of its ops ports, values of its metrics."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import Metric

from shared.net import http1
from shared.ops.access_log import AccessLog
from tests.support.secrets_search import said
from tests.support.tcp_peer import PATIENCE_S

MAX_BODY_BYTES = 1 << 20

Line = dict[str, Any]


class AccessLines:
    """Made by `access_lines`."""

    def __init__(self, log: AccessLog, reader: asyncio.StreamReader) -> None:
        self.log = log
        """What the gateway writes to."""
        self._reader = reader

    async def next(self) -> Line:
        """The next line."""
        async with asyncio.timeout(PATIENCE_S):
            line: Line = json.loads(await self._reader.readline())
            return line

    async def rest(self) -> list[Line]:
        """All further lines, once the log has been closed."""
        async with asyncio.timeout(PATIENCE_S):
            return [json.loads(line) for line in (await self._reader.read(-1)).splitlines()]


@asynccontextmanager
async def access_lines() -> AsyncIterator[AccessLines]:
    """An access log that the test reads, until the block ends."""
    read_end, write_end = os.pipe()
    reader = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb")
    )
    log = AccessLog(write_end, "json", "hgate")
    os.close(write_end)
    try:
        yield AccessLines(log, reader)
    finally:
        log.close()
        pipe.close()  # else uvloop's end of it is the next test's error


async def answer_of(server: str, port: int, path: str) -> http1.Response:
    """An answer of an ops port; `server` is its name."""
    response = await http1.get(
        f"http://127.0.0.1:{port}{path}", headers={}, timeout_s=PATIENCE_S, max_bytes=MAX_BODY_BYTES
    )
    said(f"{server}{path}", response.body)
    return response


def value_of(families: Iterable[Metric], name: str, labels: dict[str, str]) -> float:
    """The value of a metric; 0 if there is no such sample yet."""
    for family in families:
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    return 0.0

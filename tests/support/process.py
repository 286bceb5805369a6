"""Commands as processes of their own: ours, with their output line by line, and those of others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.support.tcp_peer import PATIENCE_S


class Process:
    """Made by `started`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None and process.stderr is not None
        self.pid = process.pid
        self.stdout = process.stdout
        self.stderr = process.stderr
        self.messages: list[str] = []
        """What `said` has read of standard error."""
        self._process = process

    def send(self, signum: int) -> None:
        """Sends a signal."""
        self._process.send_signal(signum)

    async def line(self) -> Any:
        """The next line of standard output, as JSON."""
        async with asyncio.timeout(PATIENCE_S):
            return json.loads(await self.stdout.readline())

    async def said(self, pattern: str) -> re.Match[str]:
        """Reads standard error up to the first record in whose message `pattern` is found."""
        async with asyncio.timeout(PATIENCE_S):
            while line := (await self.stderr.readline()).decode():
                message = json.loads(line)["message"] if line.startswith("{") else line
                self.messages.append(message)
                if match := re.search(pattern, message):
                    return match
        raise AssertionError(f"it ended without {pattern!r}: {self.messages}")

    async def ended(self) -> tuple[int, str, str]:
        """Its exit code, and what is left of its standard output and standard error."""
        async with asyncio.timeout(PATIENCE_S):
            out, err = await asyncio.gather(self.stdout.read(), self.stderr.read())
            return await self._process.wait(), out.decode(), err.decode()


@asynccontextmanager
async def started(
    module: str, *arguments: str, environ: Mapping[str, str] | None = None, before: Sequence[str] = ()
) -> AsyncIterator[Process]:
    """`python -m module` with these arguments, started by the command `before` if there is one; `environ` is
    added to our own. Killed when the block ends."""
    process = await asyncio.create_subprocess_exec(
        *before,
        *(sys.executable, "-m", module, *arguments),
        env={**os.environ, **(environ or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Process(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await Process(process).ended()


async def run(*command: object) -> tuple[int, bytes, bytes]:
    """Exit code, standard output and error of any command, such as curl, that ends by itself."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(PATIENCE_S):
        stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stdout, stderr

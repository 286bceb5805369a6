"""The `hbone` command as a process that a test talks to step by step."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.support.tcp_peer import PATIENCE_S

COMMAND = ("-m", "hbone")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, with what it wrote that nobody had read."""

    code: int
    stdout: bytes
    stderr: str


class Command:
    """A running command; its output is read only when the test asks for it."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stderr is not None
        self._process = process
        self._stdin, self._stderr = process.stdin, process.stderr
        if process.stdout is not None:
            self._stdout = process.stdout
        else:
            self._stdout = asyncio.StreamReader()  # it went elsewhere
            self._stdout.feed_eof()

    @property
    def pid(self) -> int:
        """Its process id: the shell has made way for it."""
        return self._process.pid

    async def send(self, data: bytes) -> None:
        """Writes to its standard input, as fast as it takes it."""
        self._stdin.write(data)
        async with asyncio.timeout(PATIENCE_S):
            await self._stdin.drain()

    def end(self) -> None:
        """Ends its standard input."""
        self._stdin.close()

    async def read(self, count: int) -> bytes:
        """Exactly `count` bytes of its standard output."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._stdout.readexactly(count)

    async def rest(self) -> bytes:
        """Its standard output up to the end."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._stdout.read()

    async def line(self) -> str:
        """The next line of its standard output."""
        async with asyncio.timeout(PATIENCE_S):
            return (await self._stdout.readline()).decode().rstrip("\n")

    async def says(self, text: str) -> None:
        """Reads its standard error up to a line that has `text`."""
        async with asyncio.timeout(PATIENCE_S):
            while text not in (line := (await self._stderr.readline()).decode()):
                assert line, f"it ended without {text!r}"

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ended(self) -> Ended:
        """Waits for its end; a code below 0 is the signal that killed it."""
        async with asyncio.timeout(PATIENCE_S):
            stdout, stderr = await asyncio.gather(self._stdout.read(), self._stderr.read())
            return Ended(await self._process.wait(), stdout, os.fsdecode(stderr))

    async def stop(self) -> None:
        """Makes sure that nothing of it is left, its temporary files included if it still listens."""
        self._stdin.close()
        try:
            if self._process.returncode is None:
                self._process.terminate()
            await self.ended()
        except TimeoutError:
            self._process.kill()
            await self.ended()


@asynccontextmanager
async def running(
    *arguments: object,
    environ: Mapping[str, str] | None = None,
    python: tuple[str, ...] = COMMAND,
    shell: str = 'exec "$@"',
    stdout: int = PIPE,
) -> AsyncIterator[Command]:
    """Runs `hbone ARGUMENTS`, with nothing of this process' environment that it would look at, until the
    block ends. `shell` is what a shell does to start it, as ssh has it done; `stdout` may be a descriptor."""
    process = await asyncio.create_subprocess_exec(
        *("/bin/sh", "-c", shell, "sh", sys.executable, *python, *map(str, arguments)),
        stdin=PIPE,
        stdout=stdout,
        stderr=PIPE,
        env={name: value for name, value in os.environ.items() if name != "GCE_METADATA_HOST"}
        | dict(environ or {}),
    )
    command = Command(process)
    try:
        yield command
    finally:
        await command.stop()


async def output_of(*arguments: object, environ: Mapping[str, str] | None = None) -> Ended:
    """Runs `hbone ARGUMENTS` with an empty standard input to its end."""
    async with running(*arguments, environ=environ) as command:
        command.end()
        return await command.ended()

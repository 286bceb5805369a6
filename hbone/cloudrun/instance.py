"""A service that scales to zero: its one instance is started by the first request that needs it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from shared.address import Address
from shared.errors import UnavailableError, UpstreamError
from shared.net.dial import dial_socket
from shared.tasks import spawn

log = logging.getLogger("hbone.cloudrun")

POLL_S = 0.05
"""Between two looks at the instance's port."""

STDERR = 2
"""Our standard output is for a shell's eval."""

CONNECT_TIMEOUT_S = 1.0
STOP_TIMEOUT_S = 10.0
"""What Cloud Run gives an instance between SIGTERM and SIGKILL."""


class Instance:
    """The instance: a command that listens on `container` once it has started.

    It is started again by the next request if it has ended by itself.
    """

    def __init__(self, command: Sequence[str], container: Address) -> None:
        self._command = command
        self._container = container
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[None] | None = None
        self._is_there = False

    @property
    def is_there(self) -> bool:
        """Whether it runs and has accepted a connection."""
        return self._is_there and self._runs

    @property
    def _runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def ready(self, timeout_s: float) -> None:
        """Returns once the instance accepts connections; starts it if it is not there.

        Raises:
            UnavailableError: the command could not be run, or has ended.
            TimeoutError: it does not accept any within `timeout_s` seconds, and goes on starting.
        """
        if self.is_there:
            return
        if self._starting is None or self._starting.done():
            self._starting = spawn(self._start(), name="start of the instance")
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(self._starting)

    async def close(self) -> None:
        """Ends the instance: SIGTERM, and SIGKILL after ten seconds."""
        if self._starting is not None:
            self._starting.cancel()
        process = self._process
        if process is None or not self._runs:
            return
        process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
                return
        except TimeoutError:
            process.kill()
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()

    async def _start(self) -> None:
        self._is_there = False
        if not self._runs:
            log.info("instance starts: %s", self._command[0])
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=STDERR
                )
            except OSError as error:
                raise UnavailableError(f"--start {self._command[0]}: {error.strerror}") from error
        while not await self._accepts():
            assert self._process is not None
            if not self._runs:
                text = f"the instance has ended with exit code {self._process.returncode} before it listened"
                raise UnavailableError(text)
            await asyncio.sleep(POLL_S)
        self._is_there = True
        log.info("instance is there: %s", self._container)

    async def _accepts(self) -> bool:
        try:
            (await dial_socket(self._container, CONNECT_TIMEOUT_S)).close()
        except UpstreamError:
            return False
        return True

"""A process under load: started, watched through its log, stopped.

What it says goes to files and is not read through pipes as the demo does: a hundred thousand lines of an
access log would take the load client's own time.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared import core_dumps
from tests.stress import figures
from tests.support.world import is_error

START_TIMEOUT_S = 30.0
"""For a process to say that it serves, on a busy machine."""

STOP_TIMEOUT_S = 45.0
"""For a process to end after SIGTERM: longer than the drain of any scenario."""

TOLD_ON_STDOUT = ("echo", "cloudrun")
"""Programs that say on standard output where they listen; hgate's has the access log."""


class Program:
    """A running command."""

    def __init__(
        self, name: str, arguments: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._forgiven: list[str] = []
        self._out = folder / f"{name}.out"
        self._err = folder / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env={
                    **os.environ,
                    core_dumps.VARIABLE: "1",
                    **(environ or {}),
                },  # else only root counts its files
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.pid = self._process.pid

    async def said(self, pattern: str, timeout_s: float = START_TIMEOUT_S) -> re.Match[str]:
        """The first match in what it said. AssertionError if there is none in time."""
        found: re.Match[str] | None = None

        def look() -> bool:
            nonlocal found
            found = re.search(pattern, self._text())
            return found is not None or self._process.poll() is not None

        await figures.settled(look, timeout_s)
        assert found, f"{self.name} did not say {pattern!r} but {self._text()[-300:]!r}"
        return found

    def count(self, pattern: str) -> int:
        """How often it said something."""
        return len(re.findall(pattern, self._text()))

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def send(self, signum: int) -> None:
        """Sends a signal."""
        self._process.send_signal(signum)

    async def ended(self, timeout_s: float = STOP_TIMEOUT_S) -> int | None:
        """Its exit code once it has ended, None if it has not in time."""
        await figures.settled(lambda: self.exit_code is not None, timeout_s)
        return self.exit_code

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        if self.exit_code is None:
            self.send(signal.SIGTERM)
            if await self.ended() is None:
                self._process.kill()
                await self.ended()

    def faults(self) -> list[str]:
        """Errors and tracebacks in its log; not the ends of tunnels, whatever was done to them."""
        lines = (line for line in self._text().splitlines() if is_error(line))
        return [line for line in lines if not any(text in line for text in self._forgiven)]

    def forgive(self, text: str) -> None:
        """An error with this text was asked for."""
        self._forgiven.append(text)

    def _text(self) -> str:
        file = self._out if self.name in TOLD_ON_STDOUT else self._err
        return file.read_text(errors="replace")

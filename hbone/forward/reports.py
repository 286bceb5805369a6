"""What a forward says on standard error: lines of text, and on a terminal one line of rates below them.

A way that fails says so at most once in a while, however many connections fail with it, and once more when it
works again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from shared.ops.log import one_line, redact
from shared.ops.repeated_log import RepeatedLog

log = logging.getLogger("hbone.forward")

EVERY_S = 1.0
"""Between two lines of rates."""

COLUMNS = 80
"""Of a terminal that does not say how many it has."""

UNITS = ("B", "kB", "MB", "GB", "TB")


class Screen(logging.Handler):
    """Standard error: records as lines, and below them, on a terminal, the line that `rates()` gives."""

    def __init__(self, stream: TextIO, rates: Callable[[], str] | None = None) -> None:
        """`rates` None: there is no such line."""
        super().__init__()
        self._stream = stream
        self._rates = rates
        self._shown = 0  # columns of the line of rates that is there
        self._timer: asyncio.TimerHandle | None = None
        self.with_time = False
        """Whether each line begins with the time of day."""

    def start(self) -> None:
        """Shows the rates from now on."""
        if self._rates is not None:
            self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._again)

    def stop(self) -> None:
        """Removes the line of rates."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._write(self._clear())

    def emit(self, record: logging.LogRecord) -> None:
        text = redact(one_line(record.getMessage()))
        stamp = time.strftime("%H:%M:%S ", time.localtime(record.created)) if self.with_time else ""
        self._write(f"{self._clear()}{stamp}{text}\n")

    def _again(self) -> None:
        assert self._rates is not None
        line = self._rates()[: _columns(self._stream) - 1]
        self._write(f"\r{line:{self._shown}}")
        self._shown = len(line)
        self.start()

    def _clear(self) -> str:
        shown, self._shown = self._shown, 0
        return f"\r{'':{shown}}\r" if shown else ""

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            pass  # the terminal is gone, and with it who could be told


def set_up(rates: Callable[[], str], environ: Mapping[str, str], *, quiet: bool, verbose: bool) -> Screen:
    """Has what is logged appear on standard error. `quiet`: nothing; `verbose`: each connection, too."""
    stream = sys.stderr if sys.stderr is not None else open(os.devnull, "w")  # noqa: SIM115  # for good
    shows_rates = stream.isatty() and environ.get("TERM", "dumb") != "dumb" and not quiet
    screen = Screen(stream, rates if shows_rates else None)
    ours = logging.getLogger("hbone")
    ours.addHandler(screen)
    ours.propagate = False
    ours.setLevel(logging.CRITICAL if quiet else logging.WARNING)
    if not quiet:
        log.setLevel(logging.DEBUG if verbose else logging.INFO)
    return screen


class Troubles:
    """What fails, and what works again."""

    def __init__(self) -> None:
        self._lines = RepeatedLog(log)
        self._failing: set[str] = set()

    def failed(self, way: str, text: str) -> None:
        """Connections of `way` fail: `text` says why."""
        self._failing.add(way)
        self._lines.warning(way, f"{way}: {text}")

    def lost(self, way: str) -> None:
        """What has been said of something else means that `way` fails, too."""
        self._failing.add(way)

    def broke(self, way: str, text: str) -> None:
        """A connection of `way` broke. Whether others would is not known."""
        self._lines.warning(f"{way} broke", f"{way}: {text}")

    def noted(self, kind: str, text: str) -> None:
        """Something of a `kind` that is no way's."""
        self._lines.warning(kind, text)

    def works(self, way: str) -> None:
        """A connection of `way` has been opened."""
        if way in self._failing:
            self._failing.discard(way)
            self._lines.forget(way)
            log.info("%s works again", way)

    def is_failing(self, way: str) -> bool:
        """Whether the last that is known of it is that it fails."""
        return way in self._failing

    def close(self) -> None:
        """Writes what has not been told."""
        self._lines.close()


def amount(count: float) -> str:
    """A number of bytes, with the unit that makes it readable: 1.5 MB."""
    for unit in UNITS[:-1]:
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} {UNITS[-1]}"


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or COLUMNS
    except (OSError, ValueError):
        return COLUMNS

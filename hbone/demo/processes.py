"""The demo's processes: the real commands, with their output collected as records.

Each prints JSON lines, for which the demo waits, and from which it prints what happened.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from shared.errors import UnavailableError

START_TIMEOUT_S = 60.0
"""For a process to start; Envoy is the slowest."""

STOP_TIMEOUT_S = 15.0
"""For a process to end after SIGTERM; longer than krun's own drain."""

LAST_LINES_TIMEOUT_S = 1.0
"""For the output of a process that has ended; a child of its own may have outlived it and hold the pipe."""

KEPT_RECORDS = 1000
"""A request leaves one or two per process; with `--keep` there may be any number of them."""

Record = dict[str, Any]


class Process:
    """A running command whose output lines are collected."""

    def __init__(self, name: str, arguments: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self._records: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self._changed = threading.Condition()
        self._log = (folder / f"{name}.log").open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # ^C is for the demo, which stops them in order
        )
        self._readers = [
            threading.Thread(target=self._collect, args=(stream,), name=f"{name}'s output", daemon=True)
            for stream in (self._process.stdout, self._process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def wait_for(self, wanted: Callable[[Record], bool], timeout_s: float = START_TIMEOUT_S) -> Record:
        """The first record, past or future, that is `wanted`; a plain text line is a record with `text`.

        Raises:
            UnavailableError: the process ended, or had no such record within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                for record in self._records:
                    if wanted(record):
                        return record
                left_s = deadline - time.monotonic()
                ended = self._process.poll() is not None and not any(r.is_alive() for r in self._readers)
                if ended or left_s <= 0:
                    why = f"ended with exit code {self._process.returncode}" if ended else "took too long"
                    raise UnavailableError(f"{self.name} {why}; its last line: {self._last_line()}")
                self._changed.wait(min(left_s, 0.5))

    def faults(self) -> list[str]:
        """What its records say of tunnels and connections that failed."""
        with self._changed:
            return [
                f"{self.name}: {one.get('flags')}: {one['error']}"
                for one in self._records
                if one.get("error")
            ]

    def stop(self) -> int:
        """Ends the process, by force if it does not follow SIGTERM, and returns its exit code."""
        self._process.terminate()
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        for reader in self._readers:
            reader.join(LAST_LINES_TIMEOUT_S)
        with self._changed:
            self._log.close()
        return code

    def _collect(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._add(line)
        with self._changed:
            self._changed.notify_all()

    def _add(self, line: str) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        with self._changed:
            self._records.append(record if isinstance(record, dict) else {"text": line.rstrip("\n")})
            self._changed.notify_all()
            if not self._log.closed:
                self._log.write(line)
                self._log.flush()

    def _last_line(self) -> str:
        if not self._records:
            return "none"
        last = self._records[-1]
        return str(last.get("message") or last.get("text"))

"""What a scenario is given: a folder, and where it reports its rows as it goes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.stress.table import Row


class Run:
    """One scenario's run. What it has reported stays, whatever happens to it afterwards."""

    def __init__(self, scenario: str, folder: Path, *, quiet: bool = False) -> None:
        self.scenario = scenario
        self.folder = folder
        self.rows: list[Row] = []
        self._quiet = quiet
        self._started = time.monotonic()

    def row(self, part: str, demanded: str, measured: str, *, passed: bool) -> None:
        """Reports a demand and what came of it; `part` says what of the scenario it is about."""
        self.rows.append(Row(f"{self.scenario}: {part}", demanded, measured, passed))
        self.note(f"{'PASS' if passed else 'FAIL'} {part}: {measured}")

    def note(self, text: str) -> None:
        """Tells whoever watches how far it is, on standard error."""
        if not self._quiet:
            print(
                f"{self.scenario} {time.monotonic() - self._started:6.1f} s  {text}",
                file=sys.stderr,
                flush=True,
            )

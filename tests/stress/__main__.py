"""`make stress`, or `python -m tests.stress [NAME...]`: hgate and krun under load and attack, with figures.

Prints one table: scenario, what was demanded, what was measured, PASS or FAIL. The exit code is 1 if
anything failed. Each scenario runs against processes of its own; all load and all attacks stay on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.needs import open_files
from shared import loop
from shared.errors import EXIT_OK, HboneError
from shared.open_files import allow_many
from tests.stress import (
    churn,
    descriptors,
    flood,
    idle,
    impatient,
    million,
    names,
    probes,
    readers,
    restart,
    services,
    stall,
    uploads,
)
from tests.stress.clients import BrokenError
from tests.stress.run import Run
from tests.stress.table import Row, render

Scenario = Callable[[Run], Awaitable[None]]

SCENARIOS: dict[str, tuple[Scenario, float]] = {
    "idle": (idle.hold, 150.0),
    "churn": (churn.churn, 300.0),
    "restart": (restart.rolling, 180.0),
    "reload": (restart.reloads, 120.0),
    "descriptors": (descriptors.exhaust, 120.0),
    "flood": (flood.flood, 300.0),
    "impatient": (impatient.impatient, 60.0),
    "probes": (probes.probes, 90.0),
    "services": (services.services, 60.0),
    "million": (million.million, 150.0),
    "stall": (stall.stall, 150.0),
    "names": (names.random_names, 120.0),
    "uploads": (uploads.uploads, 120.0),
    "readers": (readers.readers, 90.0),
}
"""By name, with the seconds that each may take; together 15 minutes on two cores."""

EXIT_FAILED = 1


def main() -> int:
    """Runs what the command line names, all if it names none."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(SCENARIOS)}")
    parser.add_argument(
        "--again",
        action="store_true",
        help="run a scenario in which something failed once more, and let that count: for noisy machines",
    )
    arguments = parser.parse_args()
    names = arguments.names or [name for name in SCENARIOS if name not in _left_out()]
    unknown = sorted(set(names) - set(SCENARIOS))
    if unknown:
        parser.error(f"no scenario is called {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    allow_many()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the processes are stopped
    rows: list[Row] = []
    try:
        for name in names:
            found = _scenario(name)
            if arguments.again and not all(row.passed for row in found):
                print(f"{render(found)}\n\n{name}: once more", flush=True)
                found = _scenario(name)
            rows += found
    finally:
        print(render(rows))
    failed = sum(not row.passed for row in rows)
    print(f"\n{len(rows) - failed} of {len(rows)} passed")
    return EXIT_FAILED if failed else EXIT_OK


def _left_out() -> tuple[str, ...]:
    """Scenarios that cannot be had on this machine, which is said."""
    need = open_files("the 10,000 idle tunnels (idle) are")
    if need.is_there():
        return ()
    print(f"stress: {need.message()}", file=sys.stderr, flush=True)
    return ("idle",)


def _scenario(name: str) -> list[Row]:
    """Runs one; whatever ends it early is a row too."""
    scenario, timeout_s = SCENARIOS[name]
    with tempfile.TemporaryDirectory(prefix=f"stress-{name}-") as folder:
        run = Run(name, Path(folder))

        async def bounded() -> None:
            async with asyncio.timeout(timeout_s):
                await scenario(run)

        try:
            loop.run(bounded())
        except TimeoutError:
            run.row("whole", f"done within {timeout_s:g} s", "not done", passed=False)
        except (AssertionError, BrokenError, EOFError, ExceptionGroup, HboneError, OSError) as error:
            run.row("whole", "runs to its end", f"{type(error).__name__}: {error}", passed=False)
    return run.rows


if __name__ == "__main__":
    sys.exit(main())

"""How a program ends: its exit code, and the line on standard error that says why."""

from __future__ import annotations

import sys
from collections.abc import Callable

from shared.errors import EXIT_OK, EXIT_SIGINT, ConfigError, HboneError

MAX_SHOWN = 100
"""Mistakes of one file that are printed: more have one cause."""


def exit_code(program: str, work: Callable[[], int]) -> int:
    """Calls `work` and returns its exit code, or that of its error, which is printed as `PROGRAM: TEXT`."""
    try:
        return work()
    except SystemExit as stop:  # --help, --version, and a signal's handler
        return int(stop.code or EXIT_OK)
    except HboneError as error:
        if sys.stderr is not None:  # else print would take standard output for it
            from shared.printable import printable

            for line in _lines(error):
                print(f"{program}: {printable(line)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_SIGINT


def _lines(error: HboneError) -> list[str]:
    if not isinstance(error, ConfigError):
        return [str(error)]
    shown = [str(mistake) for mistake in error.all[:MAX_SHOWN]]
    more = len(error.all) - len(shown)
    return [*shown, f"{more} more mistakes"] if more else shown

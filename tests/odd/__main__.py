"""`make test-odd`, or `python -m tests.odd [NAME...]`: tests on machines and in shells that are odd.

Each condition of `conditions.py` is brought about and shown to be in effect, and the tests that it can touch
are run under it. What cannot be brought about here is left out, with the reason. What pytest says is kept in
build/odd/NAME.log, its last lines are shown where something failed.

Exit code: 0, or 1 if a test failed under any condition.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.odd.conditions import CONDITIONS, Changed, Condition
from tests.support.checkout import ROOT

LOGS = ROOT / "build" / "odd"

SHOWN_LINES = 40

EXIT_FAILED = 1

_SUMMARY = re.compile(r"\d+ (passed|failed|error)")


def main() -> int:
    """Runs what the command line names, all if it names none."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.odd",
        description=__doc__.partition("\n\n")[0],
        epilog="\n".join(f"{name:12} {condition.what}" for name, condition in CONDITIONS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="conditions; all, if none is named")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="these instead of those that it can touch")
    given = parser.parse_args()
    unknown = sorted(set(given.names) - set(CONDITIONS))
    if unknown:
        parser.error(f"no condition is called {', '.join(unknown)}; there are {', '.join(CONDITIONS)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was brought about is undone
    LOGS.mkdir(parents=True, exist_ok=True)
    failed = [
        name for name in given.names or CONDITIONS if not _passes(name, CONDITIONS[name], given.tests or ())
    ]
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return EXIT_FAILED if failed else 0


def _passes(name: str, condition: Condition, tests: tuple[str, ...]) -> bool:
    """Runs one and tells how it went; what is left out has not failed."""
    missing = condition.lacks()
    if missing:
        print(f"{name:12} left out, it takes {missing}", flush=True)
        return True
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix=f"odd-{name}-") as name_of,
        condition.make(Path(name_of)) as there,
    ):
        proof = _run(there, ["-c", condition.proof])
        if proof.returncode:
            print(f"{name:12} NOT IN EFFECT: {proof.stdout.strip().splitlines()[-1:]}", flush=True)
            return False
        wanted = dict.fromkeys(tests or condition.tests)
        ran = _run(there, ["-m", "pytest", "-q", "-p", "no:cacheprovider", *condition.flags, *wanted])
    log = LOGS / f"{name}.log"
    log.write_text(ran.stdout, encoding="utf-8", errors="backslashreplace")
    lines = ran.stdout.strip().splitlines()
    summary = next((line for line in reversed(lines) if _SUMMARY.search(line)), "no tests ran")
    verdict = "FAILED" if ran.returncode else "passed"
    print(f"{name:12} {verdict} in {time.monotonic() - began:.0f} s: {summary}", flush=True)
    if ran.returncode:
        print("\n".join(lines[-SHOWN_LINES:]) + f"\n({log})", flush=True)
    return ran.returncode == 0


def _run(changed: Changed, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Our Python with these arguments, under the condition; both outputs in one."""
    return subprocess.run(
        changed.wrap([changed.python, *arguments]),
        cwd=changed.folder,
        env={**os.environ, **changed.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="backslashreplace",
    )


if __name__ == "__main__":
    sys.exit(main())

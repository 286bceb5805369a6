"""The long run: `python -m tests.fuzz.run [--seconds N] [TARGET...]`, each target in a process of its own.

With atheris (`make fuzz` installs it) coverage guides the changes, without it they are blind. What finds new
ways through the code is kept in build/fuzz/TARGET and is where the next run starts, beside the entries of
`targets.py`. An input that breaks its target's promise is written to tests/fuzz/crashes/, one for each place
where it broke, and shown with the command that replays it; the run goes on behind it.

Exit code: 0, or 1 if any promise was broken.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.targets import FuzzTarget

ROOT = Path(__file__).parent.parent.parent
CRASHES = Path(__file__).with_name("crashes")
WORK = ROOT / "build" / "fuzz"

DEFAULT_SECONDS = 60
"""Enough for some ten thousand executions of the slowest target."""

HANG_S = 20
"""One input takes milliseconds; an event loop that it keeps for this long serves nobody."""

MEMORY_MIB = 1024
"""A process with the biggest target stays below 150 MiB."""

INSTRUMENTED = ["agent", "gateway", "hbone", "shared", "hpack", "yaml"]
"""The packages whose coverage guides: ours, and those that read for us in Python."""

_STATISTICS = re.compile(r"^(?:stat::)?(\w+): +(\d+)$", re.MULTILINE)


def main() -> int:
    """Runs, or replays, what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.run", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--seconds", type=int, default=DEFAULT_SECONDS, help="for each target")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="feed one file to one target")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # the process of one target
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all, if none is named")
    given = parser.parse_args()
    if given.alone:
        _fuzz(given.targets[0], given.seconds)
    from tests.fuzz.targets import TARGETS

    unknown = set(given.targets) - set(TARGETS)
    if unknown or (given.replay and len(given.targets) != 1):
        parser.error(
            f"TARGET is one of {' '.join(TARGETS)}" + (", one with --replay" if given.replay else "")
        )
    if given.replay:
        TARGETS[given.targets[0]].check(given.replay.read_bytes())
        print(f"{given.replay}: {given.targets[0]} keeps its promise")
        return 0
    broken = [name for name in given.targets or TARGETS if not _run(name, given.seconds)]
    return 1 if broken else 0


def _run(name: str, seconds: int) -> bool:
    """Fuzzes one target in a process of its own and prints its line. True if no promise was broken."""
    CRASHES.mkdir(exist_ok=True)
    before = set(CRASHES.iterdir())
    command = [sys.executable, "-m", "tests.fuzz.run", "--alone", "--seconds", str(seconds), name]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    found = sorted(set(CRASHES.iterdir()) - before)
    statistics = dict(_STATISTICS.findall(done.stderr))
    if done.returncode or not statistics:
        print(done.stderr[-4000:], file=sys.stderr)
    print(
        f"{name}: {statistics.get('number_of_executed_units', '?')} executions,"
        f" {statistics.get('average_exec_per_sec', '?')} exec/s,"
        f" {statistics.get('new_units_added', '?')} new corpus entries, {len(found)} crashes",
        flush=True,
    )
    for path in found:
        print(f"  {sys.executable} -m tests.fuzz.run --replay {path.relative_to(ROOT)} {name}", flush=True)
    return done.returncode == 0 and not found


# In the target's own process.


def _fuzz(name: str, seconds: int) -> None:
    """Does not return: libFuzzer ends the process."""
    if importlib.util.find_spec("atheris") is None:
        from tests.fuzz.targets import TARGETS

        _fuzz_blindly(TARGETS[name], seconds)
        sys.exit(0)
    atheris = importlib.import_module("atheris")  # by name: it is installed for fuzzing only, without types
    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    seeds, work = WORK / "seeds" / name, WORK / name
    for folder in (seeds, work):
        folder.mkdir(parents=True, exist_ok=True)
    for entry, data in target.entries().items():
        (seeds / entry).write_bytes(data)
    options = {
        "max_total_time": seconds,
        "max_len": target.max_bytes,
        "timeout": HANG_S,
        "report_slow_units": HANG_S,
        "rss_limit_mb": MEMORY_MIB,
        "print_final_stats": 1,
        "artifact_prefix": f"{CRASHES}/{name}-",
    }
    flags = [f"-{option}={value}" for option, value in options.items()]
    atheris.Setup([sys.argv[0], *flags, str(work), str(seeds)], _guarded(target))
    atheris.Fuzz()


def _fuzz_blindly(target: FuzzTarget, seconds: int) -> None:
    from tests.fuzz.targets import mutated

    check = _guarded(target)
    entries = list(target.entries().values())
    random = Random()
    executions = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        check(mutated(random, entries, target.max_bytes))
        executions += 1
    print(f"number_of_executed_units: {executions}", file=sys.stderr)
    print(f"average_exec_per_sec: {executions // max(seconds, 1)}", file=sys.stderr)
    print("new_units_added: 0", file=sys.stderr)


def _guarded(target: FuzzTarget) -> Callable[[bytes], None]:
    """The target's function; the first input that breaks its promise in some place is written down."""
    from tests.fuzz.targets import place_of

    places: set[str] = set()

    def check(data: bytes) -> None:
        try:
            target.check(data)
        except Exception as error:  # whatever it is, it is what is looked for
            place = place_of(error)
            if place not in places:
                places.add(place)
                path = CRASHES / f"{target.name}-{hashlib.sha1(data).hexdigest()[:12]}"
                path.write_bytes(data)
                print(f"\n{path.relative_to(ROOT)}: {place}", file=sys.stderr)
                traceback.print_exception(error)

    return check


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())

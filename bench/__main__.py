"""`make bench`: hgate and krun beside Envoy in the same place, on the same wire, in one run.

python -m bench                       everything; results in bench/results/
python -m bench --only hgate,krun     these places only; nothing is written
python -m bench compare OLD NEW       holds two results against each other; exit code 1: something got worse
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from bench import measure, needs, plots, results, subjects, tools
from bench.cases import CASES
from bench.https import https
from bench.image import OWN, environment
from bench.measure import TURNS, Measured
from bench.single import growth, memory, start_up
from bench.subjects import World
from bench.tools import BenchError

EXIT_WORSE = 1
EXIT_FAILED = 2

PLACES = (*dict.fromkeys(case.place.name for case in CASES), "https", "memory", "start", "growth")


def main() -> int:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="*", metavar="compare OLD NEW", help="two files of results")
    parser.add_argument("--only", default=",".join(PLACES), help=f"some of {','.join(PLACES)}")
    parser.add_argument("--turns", type=int, default=TURNS, help="how often each case runs (%(default)s)")
    parser.add_argument(
        "--own-python",
        action="store_true",
        help="of hgate and krun, though it be older than the images'",
    )
    arguments = parser.parse_args()
    try:
        match arguments.command:
            case []:
                return _run(set(arguments.only.split(",")), arguments.turns, arguments.own_python)
            case ["compare", old, new]:
                text, worse = results.compare(results.load(Path(old)), results.load(Path(new)))
                print(text)
                return EXIT_WORSE if worse else 0
            case _:
                parser.error("takes nothing, or: compare OLD NEW")
    except (BenchError, OSError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return EXIT_FAILED


def _run(places: set[str], turns: int, own_python: bool) -> int:
    unknown = places - set(PLACES)
    if unknown:
        raise BenchError(f"no place is called {', '.join(sorted(unknown))}; there are {', '.join(PLACES)}")
    _raise_descriptor_limit()
    left_out = _left_out(places)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        tools.build()
        subjects.find_envoy()
        world = World.create(Path(folder), OWN if own_python else environment())
        about = results.machine(world.environment)
        print(results.subject_line(about), flush=True)
        measured = places - set(left_out)
        cases = list(_cases(world, measured, turns))
        figures = [
            figure
            for name, part in (("start", start_up), ("memory", memory))
            if name in measured
            for figure in part(world)
        ]
        curves = list(growth(world)) if "growth" in measured else []
    found = results.document(cases, figures, curves, about, left_out)
    print("\n" + results.table(found))
    print(f"\n{time.monotonic() - began:.0f} s")
    if places == set(PLACES):
        results.FOLDER.mkdir(exist_ok=True)
        results.LATEST.write_text(json.dumps(found, indent=1) + "\n")
        (results.FOLDER / "latest.txt").write_text(results.table(found) + "\n")
        written = plots.draw(json.loads(results.LATEST.read_text()), results.FOLDER)
        print(f"written: {', '.join(str(path) for path in [results.LATEST, *written])}")
    return 0


def _left_out(places: set[str]) -> dict[str, str]:
    """Those of `places` that cannot be measured here, and what is missing; said now, not after the others.

    Raises:
        BenchError: nothing can be measured.
    """
    missing = needs.missing()
    for need in missing:
        print(f"bench: {need.message()}", file=sys.stderr, flush=True)
    if any(not need.left_out for need in missing):
        raise BenchError("nothing can be measured without it")
    left_out = {place: need.what for need in missing for place in need.places if place in places}
    if places <= set(left_out):
        raise BenchError(f"{', '.join(sorted(places))}: left out, so there is nothing to measure")
    return left_out


def _cases(world: World, places: set[str], turns: int) -> Iterator[Measured]:
    for place, cases in groupby(CASES, key=lambda case: case.place):
        if place.name not in places:
            continue
        with measure.standing(world, place) as stand:
            for case in cases:
                yield _told(measure.measure(stand, case, turns))
    if "https" in places:
        for measured in https(world, turns):
            yield _told(measured)


def _told(measured: Measured) -> Measured:
    """Something to read while it runs."""
    print(results.case_line(results.of_case(measured)), flush=True)
    return measured


def _raise_descriptor_limit() -> None:
    """10,000 tunnels take as many descriptors, in each process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main())

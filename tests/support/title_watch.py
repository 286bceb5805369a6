"""Writes down every command line that the processes below its parent ever show, until its input is closed.

A script of its own, so that it neither disturbs nor is slowed by what it watches: `title_watch.py FILE`. A
process that lives for less than LOOK_EVERY_S may be missed; those that carry tokens live longer.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path

LOOK_EVERY_S = 0.1

PROC = Path("/proc")

WATCH = os.path.basename(__file__).encode()


def command_lines(root: int) -> Iterator[bytes]:
    """Those of all processes below the process `root` as they are now, each after its short name. A run in
    the run has a watch of its own, and is left to that."""
    parents: dict[int, int] = {}
    lines: dict[int, bytes] = {}
    for entry in filter(str.isdigit, os.listdir(PROC)):
        name, _, about = _read(PROC / entry / "stat").rpartition(b")")  # the name may have anything in it
        if about:
            parents[int(entry)] = int(about.split()[1])
            arguments = _read(PROC / entry / "cmdline").strip(b"\0").replace(b"\0", b" ")
            lines[int(entry)] = name.partition(b"(")[2] + b" " + arguments
    watched = {parents[process] for process, line in lines.items() if WATCH in line} - {root}
    for process, line in lines.items():
        above = process
        for _ in parents:  # no further: a number that was given again while we read may close a circle
            if above not in parents or above in watched or above == root:
                break
            above = parents[above]
        if above == root and process != root:
            yield line


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""  # it has ended meanwhile


def main() -> None:
    root = os.getppid()
    seen: set[bytes] = set()
    with open(sys.argv[1], "wb", buffering=0) as file:
        while not select.select([sys.stdin], [], [], LOOK_EVERY_S)[0]:
            for line in command_lines(root):
                if line not in seen:
                    seen.add(line)
                    file.write(line.replace(b"\n", b" ") + b"\n")


if __name__ == "__main__":
    main()

"""From exec to the first byte: hbone and chisel as ssh's ProxyCommand, in turns.

python -m bench.first_byte [--count N]

`on the wire` is the first byte of the command at the service's address, over TLS; `at the far end` is ssh's
first byte at the sshd, behind a front end (HAProxy) and krun, or chisel's server. The least of many is what a
quiet machine would show; the median has the others' work in it. CPU time is of the command alone.
"""

from __future__ import annotations

import argparse
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench import chisel, subjects
from bench.image import OWN, environment
from bench.subjects import DOMAIN, NAMES, World
from bench.tools import BenchError

COUNT = 40

MARK_MS = 60.0
"""For hbone's first byte on the wire."""

PATIENCE_S = 20.0

IDENTIFICATION = b"SSH-2.0-bench\r\n"
"""What ssh says first (RFC 4253 section 4.2)."""


def _first_byte(command: Sequence[str], server: socket.socket) -> tuple[float, float]:
    """Seconds, and seconds of CPU time, from exec of `command`, whose input is ssh's, until a byte has come
    to `server`. Raises BenchError if none comes."""
    server.settimeout(PATIENCE_S)
    cpu_before, began = _children_s(), time.perf_counter()
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdin is not None
        process.stdin.write(IDENTIFICATION)
        process.stdin.flush()
        accepted, _ = server.accept()
        with accepted:
            accepted.settimeout(PATIENCE_S)
            if not accepted.recv(1):
                raise BenchError(f"{command[0]} has sent nothing")
            took = time.perf_counter() - began
    except OSError as error:
        raise BenchError(f"{' '.join(command)}: {error}") from error
    finally:
        process.kill()
        process.communicate()
    return took, _children_s() - cpu_before


def _children_s() -> float:
    """CPU time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(world: World, count: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds, and seconds of CPU time, of each run, by what was run."""
    with ExitStack() as block:
        wire = block.enter_context(socket.create_server(("127.0.0.1", 0)))
        far = block.enter_context(socket.create_server(("127.0.0.1", 0)))
        wire_address, far_address = (f"127.0.0.1:{one.getsockname()[1]}" for one in (wire, far))
        krun = block.enter_context(subjects.krun(world, far_address))
        front_end = block.enter_context(subjects.front_end(world, krun.address)).address
        runs: dict[str, Callable[[], tuple[float, float]]] = {
            "python -c pass, to its exit": partial(_python, world),
            "hbone: on the wire": partial(_first_byte, hbone(world, wire_address), wire),
            "hbone: at the far end": partial(_first_byte, hbone(world, front_end), far),
        }
        try:
            theirs = block.enter_context(chisel.server(world)).address
        except BenchError as error:
            print(f"bench: without chisel: {error}", file=sys.stderr)
        else:
            to_wire, to_far = (chisel.client(world, to, far_address) for to in (wire_address, theirs))
            runs["chisel: on the wire"] = partial(_first_byte, to_wire, wire)
            runs["chisel: at the far end"] = partial(_first_byte, to_far, far)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for turn in range(count):
            for name in runs if turn % 2 else reversed(runs):
                found[name].append(runs[name]())
    return found


def hbone(world: World, front_end: str) -> list[str]:
    """`hbone URL` to the first service, by way of `front_end`."""
    url = f"https://{NAMES[0]}.{DOMAIN}{subjects.TUNNEL_PATH}"
    flags = ["--ca", str(world.ca), "--connect", front_end, "--no-token"]
    return [*world.environment.command("hbone"), *flags, url]


def _python(world: World) -> tuple[float, float]:
    """Of the interpreter alone, with what it imports by itself."""
    python = world.environment.python or (str(world.environment.scripts / "python"),)
    cpu_before, began = _children_s(), time.perf_counter()
    subprocess.run([*python, "-c", "pass"], check=True)
    return time.perf_counter() - began, _children_s() - cpu_before


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.first_byte", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="runs of each (%(default)s)")
    parser.add_argument(
        "--own-python", action="store_true", help="of hbone, though it be older than the images'"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        try:
            world = World.create(Path(folder), OWN if options.own_python else environment())
            found = measure(world, options.count)
        except BenchError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 2
    columns = ("least", "median", "CPU, least", "CPU, median")
    print(f"{'from exec, ms':32}" + "".join(f"{name:>14}" for name in columns))
    for name, runs in found.items():
        sides = ([run[side] for run in runs] for side in (0, 1))
        figures = (figure for side in sides for figure in (min(side), statistics.median(side)))
        print(f"{name:32}" + "".join(f"{figure * 1e3:>14.1f}" for figure in figures))
    met = "met" if min(found["hbone: on the wire"])[0] * 1e3 <= MARK_MS else "not met"
    print(f"mark of hbone on the wire: {MARK_MS:g} ms, {met} by the least")
    return 0


if __name__ == "__main__":
    sys.exit(main())

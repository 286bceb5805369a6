"""The C load generator: built when its sources are newer, and driven over its standard input and output.

What it can do is told in `load/load.h` and `load/client.c`.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.needs import COMPILER, HEADERS, PATH

SOURCES = Path(__file__).parent / "load"
PROGRAM = SOURCES / "build" / "load"

PATIENCE_S = 120.0
"""For one line of the generator; longer than any phase."""


class BenchError(Exception):
    """The bench cannot go on; the text says why in one line."""


def find_program(name: str, package: str) -> str:
    """Where the program is; `package` is Debian's. Raises BenchError if it is not there."""
    found = shutil.which(name, path=PATH)
    if found is None:
        raise BenchError(f"there is no {name} (Debian: apt-get install {package})")
    return found


def build() -> Path:
    """The load generator, compiled unless that has been done.

    Raises:
        BenchError: there is no compiler or no OpenSSL to compile with, or it failed.
    """
    sources = sorted(SOURCES.glob("*.[ch]"))
    newest = max(path.stat().st_mtime for path in sources)
    if PROGRAM.exists() and PROGRAM.stat().st_mtime >= newest:
        return PROGRAM
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise BenchError(COMPILER.message())
    PROGRAM.parent.mkdir(exist_ok=True)
    files = [str(path) for path in sources if path.suffix == ".c"]
    flags = ["-O2", "-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra"]
    made = PROGRAM.with_name(f"{PROGRAM.name}.{os.getpid()}")  # another process may run or build the old one
    done = subprocess.run(
        [compiler, *flags, "-o", str(made), *files, "-lssl", "-lcrypto"], capture_output=True, text=True
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[:1]
        raise BenchError(f"the load generator does not compile ({HEADERS.where_from}?): {' '.join(last)}")
    made.replace(PROGRAM)
    return PROGRAM


class _Program:
    """A running generator."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [str(build()), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The next line of its output."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.stop()
            raise BenchError(f"the load generator said nothing: {' '.join(map(str, self._process.args))}")  # type: ignore[arg-type]
        answer: dict[str, Any] = json.loads(line)
        return answer

    def say(self) -> None:
        """Tells it to go on."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def serving(kind: str, *files: Path, window_bytes: int | None = None) -> Iterator[str]:
    """The far end: `tcp` an app, `h2` and `tls` an app in HTTP/2 streams; `files` are certificate and key.
    `window_bytes` is how much a stream and a connection may send it ahead (None: as hgate and krun have it).

    Yields its HOST:PORT.
    """
    more = [] if window_bytes is None else [str(window_bytes)]
    server = _Program(["serve", "127.0.0.1:0", kind, *map(str, files), *more])
    try:
        yield str(server.read()["listening"])
    finally:
        server.stop()


@contextmanager
def far_away(address: str, round_trip_ms: float) -> Iterator[str]:
    """A path of `round_trip_ms` milliseconds to `address`, without loss and without a limit of bandwidth.
    TCP's own handshake is not delayed.

    Yields the HOST:PORT of its near end.
    """
    relay = _Program(["delay", "127.0.0.1:0", address, str(round_trip_ms / 2)])
    try:
        yield str(relay.read()["listening"])
    finally:
        relay.stop()


@dataclass(frozen=True, slots=True)
class Result:
    """What one run of a client came to."""

    operations: int
    """Tunnels, round trips, or bytes."""

    seconds: float
    load_cpu_seconds: float
    """The generator's own."""

    p50_us: float
    p99_us: float
    p999_us: float
    """Latencies in microseconds; 0 where the scenario has none."""


class Client:
    """A client whose tunnels stand; made by `client`."""

    def __init__(self, program: _Program) -> None:
        self._program = program

    def run(self) -> Result:
        """Runs the scenario. Raises BenchError if a tunnel broke."""
        self._program.say()
        answer = self._program.read()
        if answer["failed"]:
            raise BenchError(f"{answer['failed']} tunnels broke")
        return Result(**{name: answer[name] for name in Result.__slots__})


@contextmanager
def client(
    to: str, scenario: Sequence[str], *, h2: bool = False, hellos: Sequence[Path] = ()
) -> Iterator[Client]:
    """A client of `to` (HOST:PORT) that has set its tunnels up; of `hellos` each of them says one first."""
    arguments = ["client", "--to", to, *(["--h2"] if h2 else [])]
    for hello in hellos:
        arguments += ["--hello", str(hello)]
    program = _Program([*arguments, *scenario])
    try:
        program.read()
        yield Client(program)
    finally:
        program.stop()

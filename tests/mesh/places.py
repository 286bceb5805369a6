"""Network namespaces on one bridge, and processes in them.

Their names have the process id of the run in them, so that two runs do not meet. No way leads out of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

PLACES = {
    "cp": "10.77.0.1",
    "web": "10.77.0.2",
    "app": "10.77.0.3",
    "guest": "10.77.0.4",
    "echo": "10.77.0.6",
    "node": "10.77.0.7",
    "other-node": "10.77.0.8",
}
"""Names and addresses; the first has the bridge."""

BRIDGE = "cp"

PREFIX = "HBONE_TEST_MESH_PLACES"
"""The variable that tells processes of a run how its namespaces' names begin."""

END_S = 10.0
"""For a process that has been asked to end; then it is killed. Cloud Run gives a container as long."""

LAST_CHARS = 3000
"""Of a log that a failure shows."""

T = TypeVar("T")


def namespace(place: str) -> str:
    """The name of this run's namespace."""
    return f"{os.environ[PREFIX]}-{place}"


@contextmanager
def laid_out() -> Iterator[None]:
    """The namespaces and the wires between them. Raises subprocess.CalledProcessError where that is not
    allowed."""
    os.environ[PREFIX] = f"mesh-{os.getpid()}"
    try:
        for place in PLACES:
            _ip("netns", "add", namespace(place))
            _ip("-n", namespace(place), "link", "set", "lo", "up")
        bridge = namespace(BRIDGE)
        _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", bridge, "addr", "add", f"{PLACES[BRIDGE]}/24", "dev", "br0")
        _ip("-n", bridge, "link", "set", "br0", "up")
        for place, address in PLACES.items():
            if place == BRIDGE:
                continue
            own = namespace(place)
            _ip("-n", bridge, "link", "add", place, "type", "veth", "peer", "name", "eth0", "netns", own)
            _ip("-n", bridge, "link", "set", place, "master", "br0", "up")
            _ip("-n", own, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", own, "link", "set", "eth0", "up")
            _ip("-n", own, "route", "add", "default", "via", PLACES[BRIDGE])
        yield
    finally:
        for place in PLACES:
            _end_all(namespace(place))
            subprocess.run(["ip", "netns", "del", namespace(place)], stderr=subprocess.DEVNULL)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stderr=subprocess.PIPE, text=True)


def _end_all(name: str) -> None:
    """Kills what is left in a namespace: of a run that was itself killed, or a child of a child."""
    found = subprocess.run(["ip", "netns", "pids", name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    for pid in found.stdout.split():
        if int(pid) != os.getpid():
            os.kill(int(pid), signal.SIGKILL)


@dataclass
class Process:
    """A program that runs in a place; its output is in `log`."""

    name: str
    started: subprocess.Popen[bytes]
    log: Path
    """Its output, behind that of earlier processes of this name."""

    earlier_bytes: int

    @property
    def said(self) -> str:
        """All its output so far."""
        return self.log.read_bytes()[self.earlier_bytes :].decode(errors="replace")

    def end(self) -> int:
        """Asks it to end, with all of its session, and waits. Returns its exit code."""
        if self.started.poll() is None:
            os.killpg(self.started.pid, signal.SIGTERM)
        try:
            return self.started.wait(END_S)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """Kills it, with all of its session. Returns its exit code."""
        with suppress(ProcessLookupError):
            os.killpg(self.started.pid, signal.SIGKILL)
        return self.started.wait()


@dataclass
class Processes:
    """What a run has started, with its logs in `folder`."""

    folder: Path
    running: list[Process] = field(default_factory=list)

    def start(
        self,
        name: str,
        place: str,
        command: Sequence[object],
        environ: Mapping[str, object] | None = None,
        *,
        cwd: Path | None = None,
    ) -> Process:
        """Starts a program with nothing in its environment but `environ` and a PATH."""
        log = self.folder / f"{name}.log"
        words = ["ip", "netns", "exec", namespace(place), *map(str, command)]
        given = {"PATH": os.environ["PATH"], "HOME": str(self.folder)}
        given |= {key: str(value) for key, value in (environ or {}).items()}
        with log.open("ab") as output:
            earlier_bytes = output.tell()
            started = subprocess.Popen(
                words,
                env=given,
                cwd=cwd or self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        process = Process(name, started, log, earlier_bytes)
        self.running.append(process)
        return process

    def ready(self, process: Process, holds: Callable[[], bool], patience_s: float) -> float:
        """Waits until `holds`; returns the seconds since. Raises AssertionError with the end of the process's
        log if it ends before, or nothing happens in time."""
        began = time.monotonic()
        while not holds():
            code = process.started.poll()
            assert code is None, f"{process.name} ended with {code}:\n{process.said[-LAST_CHARS:]}"
            late = time.monotonic() - began > patience_s
            assert not late, f"{process.name}: not ready in {patience_s:g} s:\n{process.said[-LAST_CHARS:]}"
            time.sleep(0.05)
        return time.monotonic() - began

    def end(self) -> None:
        """Ends all, the last one first."""
        for process in reversed(self.running):
            process.end()


def run_in(place: str, *command: object, patience_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    """Runs a command in a place, to its end."""
    words = ["ip", "netns", "exec", namespace(place), *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, timeout=patience_s)


def until(look: Callable[[], T | None], patience_s: float, what: str) -> T:
    """What `look` finds, as soon as that is not None. Raises AssertionError if it is not there in time."""
    end = time.monotonic() + patience_s
    while (found := look()) is None:
        assert time.monotonic() < end, f"not within {patience_s:g} s: {what}"
        time.sleep(0.05)
    return found

"""A keystroke in an ssh session: from the byte that the terminal sends to its echo.

python -m bench.keystroke [--count N] [--round-trip-ms MS]

ssh → hbone → (a path of MS) → HAProxy as Cloud Run's front end → krun, or Envoy in its place → sshd
ssh → chisel client → (a path of MS) → HAProxy → chisel server → sshd, where chisel can be built

One session types while nothing else goes on, then beside a download through the same front end and
agent. `direct` is ssh without a tunnel. The machine's own noise is in all of them, so they take turns: each
figure is one turn's, of which the median and the least are printed. The least is what a quiet machine would
show, and what is held against the least of `direct`.
"""

from __future__ import annotations

import argparse
import getpass
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from bench import chisel, subjects
from bench.subjects import DOMAIN, NAMES, World, free_port
from bench.tools import BenchError, far_away, find_program
from shared.address import Address

COUNT = 50
"""Keys of a turn."""

GAP_S = 0.01
"""Between an echo and the next key: a very fast typist, who still waits for what was typed."""

TURNS = 20
PATIENCE_S = 30.0

_SSHD = """\
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
SetEnv HOME={folder}
"""
"""With a home that has no ~/.bashrc, whose time is not ours."""

_READY = b"ready"
_TYPED = "stty raw -echo; printf ready; exec cat"
"""Echoes each byte as it comes, by a process of its own, as an editor does; the terminal echoes nothing."""


@contextmanager
def _sshd(world: World) -> Iterator[str]:
    """A real sshd for our own user; its address."""
    keygen = find_program("ssh-keygen", "openssh-client")
    for key in ("host_key", "user_key"):
        subprocess.run(
            [keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(world.folder / key)],
            check=True,
            capture_output=True,
        )
    port = free_port()
    config = world.folder / "sshd_config"
    config.write_text(_SSHD.format(address=Address("127.0.0.1", port), folder=world.folder))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # as Debian's ssh.service does
    command = [find_program("sshd", "openssh-server"), "-D", "-e", "-f", str(config)]
    with subjects.running("sshd", command, {}, world, port) as sshd:
        yield sshd.address


class _Session:
    """ssh to our own user; one command runs there, with a terminal."""

    def __init__(self, folder: Path, options: Sequence[str], command: str) -> None:
        self._process = subprocess.Popen(
            [
                *(find_program("ssh", "openssh-client"), "-tt", "-F", "none", "-i", str(folder / "user_key")),
                *("-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=no", "-o", "LogLevel=ERROR"),
                *("-o", f"UserKnownHostsFile={folder}/known_hosts", "-o", "HostKeyAlias=container"),
                *(*options, f"{getpass.getuser()}@127.0.0.1", command),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._sink: subprocess.Popen[bytes] | None = None

    def wait_ready(self) -> None:
        """Waits until what is typed is echoed once."""
        assert self._process.stdout is not None
        said = b""
        while not said.endswith(_READY):
            if not (more := self._process.stdout.read(1)):
                raise BenchError(f"ssh ended by itself: {said!r}")
            said += more

    def type(self, count: int) -> list[float]:
        """Seconds from each of `count` keys to its echo."""
        assert self._process.stdin is not None and self._process.stdout is not None
        times = []
        for number in range(count):
            key = b"abcdefghij"[number % 10 : number % 10 + 1]
            began = time.perf_counter()
            self._process.stdin.write(key)
            if self._process.stdout.read(1) != key:
                raise BenchError("ssh ended by itself, or another byte came back")
            times.append(time.perf_counter() - began)
            time.sleep(GAP_S)
        return times

    def skip(self) -> None:
        """Throws away what the session prints, in a process of its own."""
        assert self._process.stdout is not None
        self._sink = subprocess.Popen(
            ["dd", "of=/dev/null", "bs=64k"], stdin=self._process.stdout, stderr=subprocess.DEVNULL
        )

    def close(self) -> None:
        """Ends it, with its ProxyCommand: chisel's client does not go by the end of its input."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._sink is not None:
            self._sink.wait()  # its input has ended
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def _options(world: World, front_end: str) -> list[str]:
    """ssh's, for a session through the front end."""
    hbone = " ".join(world.environment.command("hbone"))
    url = f"https://{NAMES[0]}.{DOMAIN}/_hbone/15003"
    return ["-o", f"ProxyCommand={hbone} --ca {world.ca} --connect {front_end} --no-token {url}"]


def measure(
    folder: Path, count: int, round_trip_ms: float, turns: int = TURNS
) -> dict[str, dict[str, list[list[float]]]]:
    """Seconds of each keystroke, `count` in each turn, by who is there (direct, krun, envoy, chisel) and what
    else goes on (idle, beside a download)."""
    world = World.create(folder)
    found: dict[str, dict[str, list[list[float]]]] = {}
    with ExitStack() as block:
        sshd = block.enter_context(_sshd(world))
        near = block.enter_context(far_away(sshd, round_trip_ms)) if round_trip_ms else sshd
        ways = {"direct": ["-p", near.rpartition(":")[2]]}
        for name, agent in (("krun", subjects.krun), ("envoy", subjects.envoy_agent)):
            container = block.enter_context(agent(world, sshd)).address
            front_end = block.enter_context(subjects.front_end(world, container)).address
            if round_trip_ms:
                front_end = block.enter_context(far_away(front_end, round_trip_ms))
            ways[name] = _options(world, front_end)
        try:
            theirs = block.enter_context(chisel.server(world)).address
        except BenchError as error:
            print(f"bench: without chisel: {error}", file=sys.stderr)
        else:
            if round_trip_ms:
                theirs = block.enter_context(far_away(theirs, round_trip_ms))
            # What it logs on standard error would be seen in the terminal.
            command = shlex.join(chisel.client(world, theirs, sshd))
            ways["chisel"] = ["-o", f"ProxyCommand={command} 2>/dev/null"]
        for turn in range(turns):
            for name in ways if turn % 2 else reversed(ways):
                with closing(_Session(folder, ways[name], _TYPED)) as session:
                    session.wait_ready()
                    session.type(5)
                    kinds = found.setdefault(name, {"idle": [], "beside a download": []})
                    kinds["idle"].append(session.type(count))
                    with closing(_Session(folder, ways[name], "exec cat /dev/zero")) as download:
                        download.skip()
                        session.type(10)
                        kinds["beside a download"].append(session.type(count))
    return {name: found[name] for name in ways}


def _percentile(turn: list[float], of: int) -> float:
    return statistics.quantiles(turn, n=100)[of - 1]


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.keystroke", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="keys typed in each turn (%(default)s)")
    parser.add_argument("--turns", type=int, default=TURNS, help="turns of each case (%(default)s)")
    parser.add_argument("--round-trip-ms", type=float, default=0.0, help="of the path (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        try:
            found = measure(Path(folder), options.count, options.round_trip_ms, options.turns)
        except BenchError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 2
    columns = ("p50", "least", "above direct", "p99", "least", "above direct")
    print(f"{'a keystroke and its echo, ms':32}" + "".join(f"{name:>14}" for name in columns))
    for kind in ("idle", "beside a download"):
        for name, kinds in found.items():
            figures: list[float] = []
            for of in (50, 99):
                turns, direct = (
                    [_percentile(turn, of) for turn in one[kind]] for one in (kinds, found["direct"])
                )
                figures += statistics.median(turns), min(turns), min(turns) - min(direct)
            print(f"{name + ', ' + kind:32}" + "".join(f"{figure * 1e3:>14.2f}" for figure in figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())

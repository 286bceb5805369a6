"""h2spec against krun: `make conformance`, or `python -m tests.conformance.run`.

Owned here: a krun as users run it, what stands behind it, the runs of h2spec, and the verdict: no case may
fail or be skipped, and krun must neither log an error nor stop in disorder. Not owned: h2spec itself, which
build_h2spec.sh builds.

h2spec takes one path, and asks it mostly with GET, now and then with POST. It is run with a path of the
app's, which answers both, and with a tunnel's, where POST opens a tunnel and GET is refused by krun itself;
with each as it comes, then with its strict case too.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket

import h11

from hbone.demo.processes import Process
from shared.address import Address
from shared.errors import EXIT_INTERNAL, EXIT_OK, HboneError, UnavailableError
from tests.path.app import READ_BYTES, App, Behaviour, echo
from tests.support.world import is_error, word_after

BUILD = Path(__file__).with_name("build_h2spec.sh")

BUILD_TIMEOUT_S = 600
"""Go compiles its standard library too: 25 s on two idle cores."""

RUN_TIMEOUT_S = 600
"""A run takes less than a second; one whose every case waits for its 2 seconds in vain takes five minutes."""

PATHS = ("/", "/_hbone/echo")

SECTIONS = ("generic", "http2", "hpack")

CASES = {False: 146, True: 147}
"""Cases of h2spec 2.6.0 in those sections, without and with the strict one: fewer would not be the whole."""

BODY = b"conformance\n" * 683
"""8 KiB: h2spec skips its cases of flow control where the body has less than 5 bytes."""

LAST_WORDS_CHARS = 300
"""What is shown of an h2spec that broke off: its last lines."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case's result."""

    name: str
    """As h2spec takes it for an argument, such as http2/6.9.1/2."""
    title: str
    problem: str = ""
    """Empty where it passed, else what h2spec wanted, in any of several ways, and what it saw last."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of h2spec."""

    path: str
    strict: bool
    cases: tuple[Case, ...]
    duration_s: float

    @property
    def problems(self) -> tuple[Case, ...]:
        """The cases that did not pass."""
        return tuple(case for case in self.cases if case.problem)

    @property
    def passed(self) -> bool:
        """Whether all cases were run and passed."""
        return len(self.cases) == CASES[self.strict] and not self.problems


def main() -> int:
    """Prints the verdict; the exit code is 0 if everything passed."""
    try:
        runs = run_all(build())
    except HboneError as error:
        print(f"conformance: {error}", file=sys.stderr)
        return error.exit_code
    print(report(runs))
    return EXIT_OK if all(run.passed for run in runs) else EXIT_INTERNAL


def build() -> Path:
    """The h2spec binary, built first where it is not there yet.

    Raises:
        UnavailableError: it cannot be built.
    """
    try:
        done = subprocess.run(["sh", BUILD], capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{BUILD.name}: not done after {BUILD_TIMEOUT_S} s") from error
    if done.returncode != EXIT_OK:
        raise UnavailableError(done.stderr.strip())
    return Path(done.stdout.strip())


def run_all(h2spec: Path) -> list[Run]:
    """Runs h2spec with every path, without and with the strict case.

    Raises:
        UnavailableError: krun or h2spec did not start or broke off, or krun logged an error.
    """
    with (
        tempfile.TemporaryDirectory(prefix="conformance-") as folder,
        App(forgiving(respond)) as app,
        App(forgiving(echo)) as target,
        agent(Path(folder), app.address, target.address) as address,
    ):
        return [run_once(h2spec, address, path, strict) for path in PATHS for strict in CASES]


def run_once(h2spec: Path, address: Address, path: str, strict: bool) -> Run:
    """Runs all sections against `address`.

    Raises:
        UnavailableError: h2spec broke off, or was not done after RUN_TIMEOUT_S seconds.
    """
    with tempfile.NamedTemporaryFile(suffix=".xml") as file:
        where = ["-h", address.host, "-p", str(address.port), "-P", path, "-j", file.name]
        command = [str(h2spec), *SECTIONS, *where, *(["--strict"] if strict else [])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
            suites = ET.parse(file).getroot()
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"h2spec {path}: not done after {RUN_TIMEOUT_S} s") from error
        except ET.ParseError as error:
            words = (done.stderr or done.stdout).strip()[-LAST_WORDS_CHARS:]
            raise UnavailableError(f"h2spec {path}: exit code {done.returncode}: {words}") from error
    duration_s = sum(float(case.get("time", "0")) for case in suites.iter("testcase"))
    return Run(path, strict, tuple(read_cases(suites)), duration_s)


def read_cases(suites: ET.Element) -> Iterator[Case]:
    """The cases of h2spec's JUnit report, which has each section's in the order of their numbers."""
    for suite in suites.iter("testsuite"):
        for number, case in enumerate(suite.iter("testcase"), 1):
            problem = ""
            for kind in ("skipped", "failure", "error"):
                found = case.find(kind)
                if found is not None:
                    problem = " | ".join((found.text or kind).split("\n"))
            yield Case(f"{suite.get('package')}/{number}", case.get("classname", ""), problem)


def report(runs: Sequence[Run]) -> str:
    """A line for each run, then two for each case that did not pass."""
    lines = [f"{'path':14}{'strict':8}{'passed':>6}{'of':>5}{'time':>9}"]
    for run in runs:
        passed = len(run.cases) - len(run.problems)
        strict = "yes" if run.strict else "no"
        lines.append(f"{run.path:14}{strict:8}{passed:6}{CASES[run.strict]:5}{run.duration_s:7.2f} s")
    for run in runs:
        for case in run.problems:
            lines.append(f"\n{case.name} with {run.path}: {case.title}\n    wanted | got: {case.problem}")
    return "\n".join(lines)


# What h2spec talks to.


@contextmanager
def agent(folder: Path, app: Address, target: Address) -> Iterator[Address]:
    """A krun in front of `app`, with `target` behind /_hbone/echo, until the block ends.

    Raises:
        UnavailableError: it did not start, did not stop in order, or logged an error.
    """
    environ = {
        "HBONE_LISTEN": "127.0.0.1:0",
        "XDS_ADDR": "-",
        "HBONE_INBOUND": "none",
        "HBONE_STARTUP_PROBE": "-",
        "HBONE_APP": str(app),
        "PORT_echo": str(target),
        "HBONE_LOG_FORMAT": "json",
    }
    process = Process("krun", ["-m", "agent"], environ, folder)
    try:
        yield Address.parse(word_after(process, "tunnels on "))
    finally:
        code = process.stop()
    if code != EXIT_OK:
        raise UnavailableError(f"krun ended with exit code {code}")
    for line in (folder / "krun.log").read_text(encoding="utf-8").splitlines():
        if is_error(line):
            raise UnavailableError(f"krun logged an error: {line}")


def respond(sock: socket) -> None:
    """Answers one HTTP/1.1 request with BODY, once it is whole."""
    connection = h11.Connection(h11.SERVER)
    parts: list[h11.Event] = [h11.Data(data=BODY), h11.EndOfMessage()]
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            connection.receive_data(sock.recv(READ_BYTES))
        elif isinstance(event, h11.ConnectionClosed):
            return
        elif isinstance(event, h11.Request) and event.method == b"HEAD":
            del parts[0]
    response = h11.Response(status_code=200, headers=[("content-length", str(len(BODY)))])
    sock.sendall(b"".join(connection.send(part) or b"" for part in (response, *parts)))


def forgiving(behave: Behaviour) -> Behaviour:
    """`behave`, but without failing when its peer leaves in the middle, as h2spec does."""

    def forgive(sock: socket) -> None:
        with contextlib.suppress(ConnectionError, h11.RemoteProtocolError):
            behave(sock)

    return forgive


if __name__ == "__main__":
    sys.exit(main())

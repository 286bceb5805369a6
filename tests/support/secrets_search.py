"""A search of everything that a test run lets out for tokens and keys: a test that leaks one fails.

A pytest plugin. Looked through, for each test: what it and its children wrote to standard output and standard
error, its log records, the text of its failure, what `said` was told (answers of admin ports, say), log files
in its folder; and at the end of the run the command lines that any process of it ever had, which a small
process of its own watches (`title_watch.py`).

What counts as a secret is told by its form, so no test has to say which ones it made: the head or the claims
of a JWT, a private key in PEM, an access token of Google's. A test whose point is to see one says so with the
mark `shows_secret`.
"""

from __future__ import annotations

import asyncio.subprocess
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

_SECRET = re.compile(
    # {" in base64url: the head of a JWT (RFC 7515), or its claims; and what follows.
    rb"(?<!COVERAGE_PROCESS_CONFIG=)eyJ[A-Za-z0-9_-]{15,}(?:\.[A-Za-z0-9_-]*)*"
    rb"|-----BEGIN [A-Z ]*PRIVATE KEY-----[A-Za-z0-9+/=\s]*"
    rb"|ya29\.[A-Za-z0-9_.-]{8,}"  # the form of Google's access tokens
)

OTHERS = (b"curl", b"nghttp", b"openssl")
"""Programs whose command lines are the tests' own, who hand them tokens of a minute."""

SHOWN_BEFORE = 60
"""Characters before a find that are shown: enough to see who said it. The find itself is not repeated."""

MAX_LOG_BYTES = 16 << 20
"""Looked at of one log file."""

_told: list[tuple[str, bytes]] = []
"""What has come from children and ports since the last test ended; all of it in one thread."""

_watch = pytest.StashKey[tuple["subprocess.Popen[bytes]", Path]]()


def said(place: str, text: bytes) -> None:
    """Has `text`, which came from `place`, looked through with the test that is running."""
    _told.append((place, text))


def finds(place: str, text: bytes) -> Iterator[str]:
    """A line for each secret in `text`, without the secret."""
    shown_from = 0  # behind the one before
    for match in _SECRET.finditer(text):
        start = max(shown_from, match.start() - SHOWN_BEFORE)
        before = text[start : match.start()].decode("utf-8", "backslashreplace")
        shown_from = match.end()
        kind = "a private key" if match[0].startswith(b"-----") else "a token"
        yield f"{place}: {kind} after {before!r}"


# What comes from children.


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "shows_secret: shows a token or a key on purpose")
    _listen(asyncio.subprocess.SubprocessStreamProtocol, "pipe_data_received", _pipe_data)
    _listen(subprocess.Popen, "communicate", _communicated)


def _listen(owner: type, name: str, tell: Callable[..., None]) -> None:
    """Calls `tell` with the result and the arguments of each call of a method."""
    plain = getattr(owner, name)
    if hasattr(plain, "tells"):
        return  # a run inside of a run

    def listening(*arguments: Any, **options: Any) -> Any:
        result = plain(*arguments, **options)
        tell(result, *arguments)
        return result

    listening.tells = True  # type: ignore[attr-defined]
    setattr(owner, name, listening)


def _pipe_data(result: object, protocol: object, fd: int, data: bytes) -> None:
    said(f"descriptor {fd} of a child", data)


def _communicated(result: tuple[Any, Any], process: subprocess.Popen[Any], *arguments: object) -> None:
    for output in result:
        if output:
            said("output of a child", output if isinstance(output, bytes) else output.encode())


# A test and its verdict.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    found = [find for section in report.sections for find in finds(section[0], section[1].encode())]
    if report.failed:
        found += finds("the failure's text", report.longreprtext.encode(errors="backslashreplace"))
    if call.when == "teardown":
        # Pieces of a child's output are joined: a token may have come in two.
        by_place: dict[str, bytes] = {}
        for place, text in _told:
            by_place[place] = by_place.get(place, b"") + text
        _told.clear()
        for place, text in by_place.items():
            found += finds(place, text)
        found += _in_log_files(item)
    if found and item.get_closest_marker("shows_secret") is None:
        report.outcome = "failed"
        told = "\n".join(dict.fromkeys(found))
        report.longrepr = f"a secret was let out (tests/support/secrets_search.py):\n{told}"
        report.sections.clear()
    return report


def _in_log_files(item: pytest.Item) -> Iterator[str]:
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if folder is not None and folder.exists():
        for file in sorted(folder.rglob("*.log")):
            if file.is_file():
                with file.open("rb") as log:
                    yield from finds(str(file.relative_to(folder)), log.read(MAX_LOG_BYTES))


# Command lines.


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # a worker of pytest-xdist: the run's watch sees its children, too
    factory = session.config._tmp_path_factory  # type: ignore[attr-defined]  # fixtures are not yet there
    titles = factory.mktemp("titles", numbered=True) / "seen"
    script = Path(__file__).with_name("title_watch.py")
    command = (sys.executable, "-I", "-S", str(script), str(titles))
    session.config.stash[_watch] = subprocess.Popen(command, stdin=subprocess.PIPE), titles


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _watch not in session.config.stash:
        return
    process, titles = session.config.stash[_watch]
    assert process.stdin is not None
    process.stdin.close()  # its sign to end
    process.wait()
    lines = titles.read_bytes().splitlines() if titles.exists() else []
    lines = [line for line in lines if not line.startswith(OTHERS)]
    found = [find for line in lines for find in finds("a command line", line)]
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(
            f"\nsecrets: {len(lines)} command lines looked through, {len(found)} with a secret"
        )
        for find in found:
            reporter.write_line(f"  {find}", red=True)
    if found:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED

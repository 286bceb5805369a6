"""A walk as text for people, and as JSON for scripts.

The keys of the JSON are stable: `target`, `ok`, `exit_code`, `hops` with `section`, `name`, `verdict`, `ms`
and `detail`, and `failure`, null or `name`, `hop`, `detail`, `cause` and `action`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from shared.doctor.hops import Section
from shared.doctor.walk import Report, Result, Verdict

_COLOURS = {Verdict.PASS: "32", Verdict.FAIL: "1;31", Verdict.SKIP: "2"}
"""SGR parameters (ECMA-48 section 8.3.117)."""

NAME_COLUMNS = 11
"""The longest name of a hop."""

TIME_COLUMNS = 7


def wants_colour(stream: TextIO | None, environ: Mapping[str, str]) -> bool:
    """Whether to write colours: on a terminal that knows them, unless NO_COLOR says no; and anywhere if
    FORCE_COLOR says so (no-color.org, force-color.org)."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    if stream is None or environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        return os.isatty(stream.fileno())
    except (OSError, ValueError):
        return False


class Table:
    """A table with a heading for each section, and what to do about a failure; row for row, as they come."""

    def __init__(self, target: str, write: Callable[[str], None], *, colour: bool) -> None:
        self._write = write
        self._colour = colour
        self._section: Section | None = None
        write(f"{target}\n")

    def row(self, result: Result) -> None:
        """Writes a row, and the heading before it if it is the first of its section."""
        section = result.hop.section
        if section is not self._section:
            self._section = section
            self._write(f"\n{section.value}\n")
        self._write(_row(result, colour=self._colour) + "\n")

    def end(self, report: Report) -> None:
        """Writes what is under the table."""
        self._write("\n" + "\n".join(summary(report, colour=self._colour)) + "\n")


def as_text(report: Report, *, colour: bool) -> str:
    """The whole table."""
    text: list[str] = []
    table = Table(report.target, text.append, colour=colour)
    for result in report.results:
        table.row(result)
    table.end(report)
    return "".join(text)


def painted(verdict: Verdict, *, colour: bool) -> str:
    """A verdict's word."""
    return f"\x1b[{_COLOURS[verdict]}m{verdict}\x1b[0m" if colour else verdict


def taken(took_s: float | None) -> str:
    """A hop's time, in columns of their own."""
    text = "" if took_s is None else f"{took_s * 1000:.0f} ms"
    return f"{text:>{TIME_COLUMNS}}"


def _row(result: Result, *, colour: bool) -> str:
    name = f"{result.name:{NAME_COLUMNS}}"
    verdict = painted(result.verdict, colour=colour)
    return f"  {name}  {verdict}  {taken(result.took_s)}  {result.detail}".rstrip()


def summary(report: Report, *, colour: bool) -> list[str]:
    """Lines: whether a hop has failed, and if so, cause and action."""
    failed = report.failed
    if failed is None or failed.failure is None:
        return [f"{painted(Verdict.PASS, colour=colour)}: no hop has failed"]
    failure = failed.failure
    word = painted(Verdict.FAIL, colour=colour)
    return [f"{word}: {failed.name}: {failure.name}", failure.cause, failure.action]


def as_object(report: Report) -> dict[str, Any]:
    """The same for JSON."""
    failed = report.failed
    told = None
    if failed is not None and failed.failure is not None:
        told = {
            "name": failed.failure.name,
            "hop": failed.failure.hop.word,
            "detail": failed.detail,
            "cause": failed.failure.cause,
            "action": failed.failure.action,
        }
    return {
        "target": report.target,
        "ok": failed is None,
        "exit_code": report.exit_code,
        "hops": [
            {
                "section": result.hop.section.value,
                "name": result.name,
                "verdict": str(result.verdict),
                "ms": None if result.took_s is None else round(result.took_s * 1000, 1),
                "detail": result.detail,
            }
            for result in report.results
        ],
        "failure": told,
    }

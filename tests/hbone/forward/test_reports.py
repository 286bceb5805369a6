from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from hbone.forward import reports
from hbone.forward.reports import Screen, Troubles, amount, log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """Ours, as it was before."""
    ours = logging.getLogger("hbone")
    before = (ours.level, ours.propagate, list(ours.handlers), log.level)
    yield ours
    ours.level, ours.propagate, ours.handlers[:], log.level = before
    logging.Logger.manager._clear_cache()  # type: ignore[attr-defined]


async def test_a_line_is_written_over_the_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "EVERY_S", 0.0)
    terminal, seen = Terminal(), iter(("12 open", "3"))
    screen = Screen(terminal, lambda: next(seen))
    screen._again()
    screen._again()
    screen.emit(logging.makeLogRecord({"msg": "a line"}))
    screen.stop()
    assert terminal.getvalue() == "\r12 open\r3      \r \ra line\n"


async def test_rates_end_where_the_terminal_does() -> None:
    terminal = Terminal()
    screen = Screen(terminal, lambda: "x" * 200)
    screen._again()
    screen.stop()
    assert len(terminal.getvalue().split("\r")[1]) == reports.COLUMNS - 1


def test_one_record_is_one_line_without_secrets() -> None:
    stream = io.StringIO()
    token = "eyJhbGciOiJSUzI1NiJ9.eyJhdWQiOiJ4In0.c2ln"
    Screen(stream).emit(logging.makeLogRecord({"msg": f"two\nlines \x1b[31m {token}"}))
    assert stream.getvalue() == "two\\nlines \\x1b[31m [redacted]\n"


def test_a_terminal_that_is_gone_is_no_error() -> None:
    stream = io.StringIO()
    stream.close()
    Screen(stream).emit(logging.makeLogRecord({"msg": "a line"}))


@pytest.mark.parametrize(
    ("environ", "quiet", "rates"),
    [
        ({"TERM": "xterm"}, False, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, True),
        ({"TERM": "dumb"}, False, False),
        ({}, False, False),
        ({"TERM": "xterm"}, True, False),
    ],
)
def test_who_sees_rates(
    monkeypatch: pytest.MonkeyPatch,
    logger: logging.Logger,
    environ: dict[str, str],
    quiet: bool,
    rates: bool,
) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    screen = reports.set_up(lambda: "", environ, quiet=quiet, verbose=False)
    assert (screen._rates is not None) == rates
    assert screen in logger.handlers


async def test_a_way_that_works_again(logger: logging.Logger) -> None:
    stream = io.StringIO()
    log.addHandler(handler := Screen(stream))
    log.setLevel(logging.INFO)
    try:
        troubles = Troubles()
        troubles.works("DB of a")
        for number in range(3):
            troubles.failed("DB of a", f"not opened: {number}")
        assert troubles.is_failing("DB of a")
        troubles.works("DB of a")
        troubles.works("DB of a")
        troubles.failed("DB of a", "not opened: later")
        troubles.close()
    finally:
        log.removeHandler(handler)
    assert stream.getvalue() == ("DB of a: not opened: 0\nDB of a works again\nDB of a: not opened: later\n")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.9, "1.0 kB"),
        (1500, "1.5 kB"),
        (99_900, "100 kB"),
        (123_456_789, "123 MB"),
        (5e15, "5000.0 TB"),
    ],
)
def test_amounts(count: float, text: str) -> None:
    assert amount(count) == text

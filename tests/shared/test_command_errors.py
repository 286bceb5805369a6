"""The line on standard error with which a command ends."""

from __future__ import annotations

import pytest

from shared.command_errors import exit_code
from shared.errors import EXIT_UNAVAILABLE, UnavailableError


def test_a_line_gives_a_terminal_no_orders(capsys: pytest.CaptureFixture[str]) -> None:
    """A name in it may be a stranger's: of a service, or of what a server has sent."""

    def fail() -> int:
        raise UnavailableError("no service \x1b]0;title\x07\x9b2J of Zürich\nhbone: all is well\udcff")

    assert exit_code("hbone", fail) == EXIT_UNAVAILABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert line == r"hbone: no service \x1b]0;title\x07\x9b2J of Zürich\nhbone: all is well\udcff"

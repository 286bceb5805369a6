"""What the command lines of all three programs have in common: the form of the help, --version, mistakes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

from shared.errors import EXIT_OK, UsageError

HELP_COLUMNS = 100
"""Of --help, whatever the terminal has. Without a width argparse asks shutil for the terminal's, and that
imports bz2 and lzma."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with --version, for which flags are not abbreviated, and which keeps the line breaks
    of its description.

    Raises UsageError for a wrong command line, and SystemExit after --help and --version.
    """

    def __init__(self, prog: str, **settings: Any) -> None:
        formatter = partial(argparse.RawDescriptionHelpFormatter, width=HELP_COLUMNS)
        super().__init__(prog=prog, formatter_class=formatter, allow_abbrev=False, **settings)
        self.color = False  # manual pages are made of it; Python 3.14 has a default of True
        self._positionals.title, self._optionals.title = "arguments", "flags"
        self.tables: dict[str, Mapping[str, str]] = {}
        """The sections that `add_table` has added, by their titles."""
        self.add_argument("--version", action=_Version, help="print the version, and Python's and OpenSSL's")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def wants_value(self, word: str) -> bool | None:
        """Whether the word behind `word`, a flag, is its value; None if no flag of ours is meant."""
        flag, has_value, _ = word.partition("=")
        action = self._option_string_actions.get(flag)
        return None if action is None else action.nargs != 0 and not has_value

    def add_log_flags(self) -> None:
        """Adds --log-level and --log-format. Without the flag the options have no such attribute."""
        self.add_argument(
            "--log-level",
            choices=("debug", "info", "warning", "error"),
            default=argparse.SUPPRESS,
            help="lowest level that is logged (default: info)",
        )
        self.add_argument(
            "--log-format",
            choices=("json", "text"),
            default=argparse.SUPPRESS,
            help="form of the log lines (default: text on a terminal, else json)",
        )

    def add_table(self, title: str, rows: Mapping[str, str]) -> None:
        """Adds a section to --help and to the manual page: each row is a word and what it means."""
        self.tables[title] = rows
        width = max(map(len, rows))
        lines = (f"{word:{width}}  {meaning}" for word, meaning in rows.items())
        self.add_argument_group(title, "\n".join(lines))


class _Version(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(
            option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print_version(parser.prog.partition(" ")[0])
        parser.exit()


def add_version_flags(parser: argparse.ArgumentParser) -> None:
    """Of a command `version`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def print_version(program: str, *, as_json: bool = False) -> int:
    """Prints one line; returns the exit code."""
    from shared import version  # the distribution's metadata takes 20 ms to find

    if as_json:
        import json

        print(json.dumps(version.facts(program)))
    else:
        print(version.describe(program))
    return EXIT_OK

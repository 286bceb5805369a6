"""Manual pages, and completions for bash, zsh and fish, made from the parsers of the three commands.

Only builds of the package run it (`python -m shared.command_pages FOLDER`): shtab is no dependency of what is
installed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from shared.command_line import Parser
from shared.errors import EXIT_OK

PROGRAMS = ("gateway.cli", "agent.cli", "hbone.cli")
"""Modules whose `parser()` returns a command line. Imported by name, because shared/ imports no program."""

SHELLS = {
    "bash": "share/bash-completion/completions/{}",
    "zsh": "share/zsh/site-functions/_{}",
    "fish": "share/fish/vendor_completions.d/{}.fish",
}
"""Where each shell looks for the completions of a command, below the prefix of an installation."""

MANUAL = "share/man/man1/{}.1"

_COMMANDS = {
    "bash": "_shtab_compgen_commands",
    "zsh": "_normal",
    "fish": "(__fish_complete_subcommand)",
    "preamble": {"bash": "_shtab_compgen_commands() {\n  compgen -c -- $1\n}"},
}
"""Completes another command and its arguments."""


_SERVICES = {
    "bash": "_shtab_hbone_services",
    "zsh": "_shtab_hbone_services",
    "fish": "(command -q hbone; and hbone complete services 2>/dev/null)",
    "preamble": {
        # Not compgen -W, which expands its words: others name services, and a name may have $(COMMAND) in it.
        "bash": "_shtab_hbone_services() {\n  local name\n  hbone complete services 2>/dev/null |\n"
        '    while IFS= read -r name; do [[ $name == "$1"* ]] && printf \'%s\\n\' "$name"; done\n}',
        "zsh": "_shtab_hbone_services() {\n"
        '  local -a services=(${(f)"$(hbone complete services 2>/dev/null)"})\n'
        "  compadd -a -- services\n}",
    },
}
"""Completes services that the cluster, or Cloud Run's API, knows."""

_WITH_SERVICE = ("connect", "ssh", "ssh-config", "forward", "doctor")
"""Commands of hbone whose URL or SERVICE may be one of them."""


def main(arguments: list[str]) -> int:
    """Writes everything below the folder in `arguments`, by the names that an installation has."""
    (folder,) = map(Path, arguments)
    for module in PROGRAMS:
        parser: Parser = importlib.import_module(module).parser()
        files = {MANUAL: manual(parser)} | {
            name: completions(parser, shell) for shell, name in SHELLS.items()
        }
        for name, text in files.items():
            file = folder / name.format(parser.prog)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return EXIT_OK


def completions(parser: Parser, shell: str) -> str:
    """The script that completes command lines of `parser` in `shell`, a key of SHELLS."""
    import shtab

    for one in (parser, *(command for _, _, command in subcommands(parser))):
        for action in one._actions:
            # shtab looks for the attribute.
            if action.metavar == "FILE":
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar == "FOLDER":
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.nargs == argparse.REMAINDER:
                action.complete = _COMMANDS  # type: ignore[attr-defined]
    for name, help, command in subcommands(parser):
        command.description = help  # in a list, beside the command's name
        if parser.prog == "hbone" and name in _WITH_SERVICE:
            for action in command._get_positional_actions():
                if action.dest in ("url", "service", "services"):
                    action.complete = _SERVICES  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)


def manual(parser: Parser) -> str:
    """The manual page of the command, with all its subcommands, as man(7) has it."""
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    day = time.strftime("%Y-%m-%d", time.gmtime(epoch))
    description = parser.description or ""
    first = " ".join(description.partition(".")[0].split())
    lines = [f'.TH {parser.prog.upper()} 1 "{day}" hbone', ".SH NAME"]
    lines += [f"{parser.prog} \\- {_escaped(first[:1].lower() + first[1:])}", ".SH SYNOPSIS"]
    lines += [*_usage(parser), ".SH DESCRIPTION", *_paragraphs(description)]
    lines += [*_section("ARGUMENTS", _arguments(parser)), *_section("FLAGS", _flags(parser))]
    for name, _, command in subcommands(parser):
        lines += [f'.SH "COMMAND {name.upper()}"', *_usage(command), ".PP"]
        lines += [
            *_paragraphs(command.description or ""),
            *_arguments(command),
            *_flags(command, of_all=False),
        ]
    for title, rows in parser.tables.items():
        lines += [f'.SH "{title.upper()}"']
        for word, meaning in rows.items():
            lines += _item(f"\\fB{_escaped(word)}\\fR", meaning)
    return "\n".join(lines) + "\n"


def subcommands(parser: Parser) -> Iterator[tuple[str, str, Parser]]:
    """The name, the help and the parser of each subcommand."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for shown in action._choices_actions:
                yield shown.dest, shown.help or "", action.choices[shown.dest]


def _section(title: str, lines: Iterable[str]) -> list[str]:
    content = list(lines)
    return [f".SH {title}", *content] if content else []


def _usage(parser: Parser) -> list[str]:
    usage = parser.format_usage().removeprefix("usage: ")
    return [".nf", *(_escaped(line.removeprefix("       ")) for line in usage.splitlines()), ".fi"]


def _paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a description; one that is indented keeps its lines."""
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield ".PP"
        if paragraph.startswith(" "):
            yield from (".nf", ".RS", *map(_escaped, map(str.strip, paragraph.splitlines())), ".RE", ".fi")
        else:
            yield from map(_escaped, paragraph.splitlines())


def _arguments(parser: Parser) -> Iterator[str]:
    for action in parser._get_positional_actions():
        if not isinstance(action, argparse._SubParsersAction):
            yield from _item(f"\\fI{_escaped(str(action.metavar))}\\fR", meaning_of(action))


def _flags(parser: Parser, *, of_all: bool = True) -> Iterator[str]:
    for words, value, meaning in flags_of(parser, of_all=of_all):
        names = ", ".join(f"\\fB{_escaped(word)}\\fR" for word in words)
        yield from _item(f"{names} \\fI{_escaped(value)}\\fR" if value else names, meaning)


def flags_of(parser: Parser, *, of_all: bool = True) -> Iterator[tuple[Sequence[str], str, str]]:
    """The words, the value and the meaning of each flag; `of_all`: also of those that every command has."""
    for action in parser._get_optional_actions():
        if of_all or action.option_strings[-1] not in ("--help", "--version"):
            value = action.metavar or "|".join(action.choices or ())
            yield action.option_strings, str(value), meaning_of(action)


def meaning_of(action: argparse.Action) -> str:
    """The help of a flag or an argument, with its default."""
    return (action.help or "") % {"default": action.default}


def _item(term: str, text: str) -> list[str]:
    return [".TP", term, _escaped(text)]


def _escaped(text: str) -> str:
    """`text` as roff prints it: a minus stays one, and no line is taken for a request."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", escaped)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

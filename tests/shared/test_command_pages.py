"""Completions as bash, zsh and fish offer them, and manual pages as man shows them."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared import command_pages
from shared.command_pages import MANUAL, SHELLS
from tests.support.world import PATIENCE_S, find_program

ROOT = Path(__file__).parent.parent.parent

COMMANDS = ("hgate", "krun", "hbone")

OFFERED = [
    ("hgate ", {"run", "check", "explain", "version"}),
    ("hgate --", {"--help", "--version", "--config", "--workers", "--log-level", "--log-format", "--check"}),
    ("hgate check --", {"--help", "--version", "--config"}),
    ("hgate explain --s", {"--sni"}),
    ("hgate --log-level ", {"debug", "info", "warning", "error"}),
    ("hgate check --config hga", {"hgate.yaml"}),
    ("hbone ", {"connect", "token", "certs", "demo", "cloudrun", "version"}),
    ("hbone connect --to", {"--token-file"}),
    ("hbone token --source ", {"auto", "metadata", "google", "gke"}),
    ("hbone certs fol", {"folder/"}),
    ("krun --", {"--help", "--version", "--log-level", "--log-format"}),
    ("krun --log-format ", {"json", "text"}),
    ("krun an-", {"an-app"}),
]
"""What is typed, and what each shell then offers."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    command_pages.main([str(folder)])
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with something to complete."""
    (tmp_path / "hgate.yaml").touch()
    (tmp_path / "folder").mkdir()
    app = tmp_path / "bin" / "an-app"
    app.parent.mkdir()
    app.write_text("#!/bin/sh\n")
    app.chmod(0o755)
    return tmp_path


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, **options)


def shell_environ(home: Path) -> dict[str, str]:
    return {"PATH": f"{home / 'bin'}:/usr/bin:/bin", "HOME": str(home), "TERM": "xterm", "LC_ALL": "C.UTF-8"}


BASH = r"""
source "$1"
IFS=' ' read -ra COMP_WORDS <<<"$2"
[[ $2 == *' ' ]] && COMP_WORDS+=('')
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
complete -p "${COMP_WORDS[0]}" >&2
$(complete -p "${COMP_WORDS[0]}" | sed 's/.* -F \([^ ]*\) .*/\1/') 2>/dev/null
printf '%s\n' "${COMPREPLY[@]}"
"""


def in_bash(script: Path, line: str, home: Path) -> set[str]:
    command = (find_program("bash"), "--norc", "-c", BASH, "bash", script, line)
    said = run(*command, env=shell_environ(home), cwd=home)
    assert re.fullmatch("complete .*\n", said.stderr)
    # Readline puts the slash behind a folder.
    return {f"{word}/" if (home / word).is_dir() else word for word in said.stdout.split()}


FISH = 'source $argv[1]; complete -C "$argv[2]"'


def in_fish(script: Path, line: str, home: Path) -> set[str]:
    command = (find_program("fish"), "--no-config", "-c", FISH, script, line)
    said = run(*command, env=shell_environ(home), cwd=home)
    assert said.stderr == ""
    return {offered.partition("\t")[0] for offered in said.stdout.splitlines()}


ZSH = r"""
PROMPT= fpath=("$SITE" $fpath)
autoload -Uz compinit
compinit -u -D
bindkey '^I' complete-word
compadd() {
    local -a offered
    [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]] || builtin compadd -A offered "$@"
    (( $#offered )) && print -lr -- $offered >>offered
    builtin compadd "$@"
}
finish() { print END >>offered }
comppostfuncs=(finish)
"""
"""compadd is what adds the words that zsh offers; comppostfuncs are called when all are there."""


def in_zsh(script: Path, line: str, home: Path) -> set[str]:
    setup, offered = home / "setup.zsh", home / "offered"
    setup.write_text(ZSH)
    terminal, shell_end = pty.openpty()
    shell = subprocess.Popen(
        [find_program("zsh"), "-f", "-i"],
        env={**shell_environ(home), "SITE": str(script.parent)},
        cwd=home,
        stdin=shell_end,
        stdout=shell_end,
        stderr=shell_end,
        start_new_session=True,
    )
    os.close(shell_end)
    try:
        os.write(terminal, f"source setup.zsh\n{line}\t".encode())
        deadline = time.monotonic() + PATIENCE_S
        while not offered.exists() or "END\n" not in offered.read_text():
            assert time.monotonic() < deadline
            if select.select([terminal], [], [], 0.05)[0]:
                os.read(terminal, 1 << 16)
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)
    words = set(offered.read_text().split()) - {"END"}
    return {f"{word}/" if (home / word).is_dir() else word for word in words}


ASK: dict[str, Callable[[Path, str, Path], set[str]]] = {"bash": in_bash, "zsh": in_zsh, "fish": in_fish}


@pytest.mark.parametrize("shell", ASK)
@pytest.mark.parametrize(("line", "offered"), OFFERED)
def test_a_shell_offers_commands_flags_and_values(
    pages: Path, home: Path, shell: str, line: str, offered: set[str]
) -> None:
    script = pages / SHELLS[shell].format(line.partition(" ")[0])
    assert ASK[shell](script, line, home) - {"-h"} == offered


@pytest.mark.parametrize("command", COMMANDS)
def test_a_manual_page_renders_without_a_warning(pages: Path, command: str) -> None:
    page = pages / MANUAL.format(command)
    lint = run(find_program("mandoc"), "-Tlint", "-Wwarning", page)
    assert (lint.returncode, lint.stdout, lint.stderr) == (0, "", "")
    environ = {"PATH": os.environ["PATH"], "MANWIDTH": "200", "LC_ALL": "C.UTF-8", "MANROFFOPT": "-c"}
    shown = run(find_program("man"), "--warnings", "-l", page, env=environ)
    assert (shown.returncode, shown.stderr) == (0, "")
    for section in ("NAME", "SYNOPSIS", "DESCRIPTION", "FLAGS", "EXIT CODES"):
        assert f"\n{section}\n" in shown.stdout
    assert "--version" in shown.stdout


def test_the_pages_of_one_source_are_alike(
    pages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    command_pages.main([str(tmp_path)])
    assert (tmp_path / MANUAL.format("krun")).read_text().startswith('.TH KRUN 1 "2001-09-09" hbone\n')
    for name in SHELLS.values():
        assert (tmp_path / name.format("krun")).read_text() == (pages / name.format("krun")).read_text()


@pytest.mark.parametrize("module", command_pages.PROGRAMS)
def test_a_parser_needs_nothing_that_a_build_does_not_have(module: str) -> None:
    made = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {module} as cli; print(cli.parser().prog)"
    said = run(sys.executable, "-I", "-S", "-c", made)
    assert said.stderr == ""
    assert said.stdout.strip() in COMMANDS

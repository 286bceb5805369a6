"""Completions as bash, zsh and fish offer them, and manual pages as man shows them."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hbone import cli as hbone
from shared import command_pages
from shared.cluster.service_annotations import URL
from shared.command_pages import MANUAL, SHELLS
from tests.support.api_server import LocalApiServer, kubeconfig, threaded_api_server
from tests.support.network import unanswering
from tests.support.world import PATIENCE_S, find_program

ROOT = Path(__file__).parent.parent.parent

COMMANDS = ("hgate", "krun", "hbone")

OFFERED = [
    ("hgate ", {"run", "check", "cluster", "doctor", "explain", "version"}),
    ("hgate --", {"--help", "--version", "--config", "--workers", "--log-level", "--log-format", "--check"}),
    ("hgate check --", {"--help", "--version", "--config"}),
    ("hgate explain --s", {"--sni"}),
    ("hgate --log-level ", {"debug", "info", "warning", "error"}),
    ("hgate check --config hga", {"hgate.yaml"}),
    (
        "hbone ",
        {
            *("connect", "ssh", "ssh-config", "token", "certs", "demo", "doctor", "forward", "register"),
            *("cloudrun", "version"),
        },
    ),
    ("hbone connect --to", {"--token-file"}),
    ("hbone token --source ", {"auto", "metadata", "google", "gke", "gcloud"}),
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


ANNOTATED = {"name": "hello", "namespace": "demo", "annotations": {URL: "https://hello.a.run.app"}}


@pytest.fixture
def cluster() -> Iterator[LocalApiServer]:
    with threaded_api_server() as server:
        yield server


@pytest.fixture
def with_cluster(home: Path, cluster: LocalApiServer) -> Path:
    """`home` with an hbone that knows a cluster with a service."""
    cluster.answer = lambda asked: (
        (200, json.dumps({"items": [{"metadata": ANNOTATED}]}).encode())
        if asked.path == "/api/v1/services?limit=500"
        else None
    )
    (home / "kubeconfig").write_text(kubeconfig(cluster))
    hbone = home / "bin" / "hbone"
    hbone.write_text(
        f'#!/bin/sh\ncd {ROOT}; KUBECONFIG={home}/kubeconfig exec {sys.executable} -m hbone "$@"\n'
    )
    hbone.chmod(0o755)
    return home


@pytest.mark.parametrize("shell", ASK)
def test_a_shell_offers_the_services_of_the_cluster(pages: Path, with_cluster: Path, shell: str) -> None:
    script = pages / SHELLS[shell].format("hbone")
    for line in ("hbone ssh h", "hbone doctor ", "hbone connect "):
        assert ASK[shell](script, line, with_cluster) == {"hello.demo"}, line
        (with_cluster / "offered").unlink(missing_ok=True)


HOSTILE = ("$(touch owned)", "`touch owned`", "$(touch${IFS}owned)", "a;touch owned", "-Jx")
"""What somebody may have put where a service's name is read."""


@pytest.mark.parametrize("shell", ASK)
def test_no_name_of_a_service_is_run(pages: Path, home: Path, shell: str) -> None:
    """Also by a completion that is newer than the `hbone` that it asks."""
    ours = home / "bin" / "hbone"
    ours.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join([*HOSTILE, "hello.demo"]) + "\nEND\n")
    ours.chmod(0o755)
    offered = ASK[shell](pages / SHELLS[shell].format("hbone"), "hbone ssh ", home)
    assert "hello.demo" in offered
    assert not (home / "owned").exists()


def test_only_names_of_services_are_offered(with_cluster: Path, cluster: LocalApiServer) -> None:
    names = (*HOSTILE, "two words", "esc\x1b[2J", "hello")
    items = [{"metadata": {**ANNOTATED, "name": name}} for name in names]
    cluster.answer = lambda _: (200, json.dumps({"items": items}).encode())
    said = run(with_cluster / "bin" / "hbone", "complete", "services", env=shell_environ(with_cluster))
    assert said.stdout == "hello.demo\n"


def test_a_cluster_that_is_gone_offers_what_it_had(with_cluster: Path) -> None:
    ask = (with_cluster / "bin" / "hbone", "complete", "services")
    environ = shell_environ(with_cluster)
    assert run(*ask, env=environ).stdout == "hello.demo\n"
    with unanswering() as port:
        access = json.loads((with_cluster / "kubeconfig").read_text())
        access["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
        (with_cluster / "kubeconfig").write_text(json.dumps(access))
        began = time.monotonic()
        said = run(*ask, env=environ)
        assert (said.returncode, said.stdout, said.stderr) == (0, "", ""), "another context, another list"
        assert time.monotonic() - began < 5
    (with_cluster / "kubeconfig").write_text("{")
    said = run(*ask, env=environ)
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


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


def test_man_hbone_has_every_command_with_examples_variables_and_exit_codes(pages: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "MANWIDTH": "120", "LC_ALL": "C.UTF-8", "MANROFFOPT": "-c"}
    shown = run(find_program("man"), "-l", pages / MANUAL.format("hbone"), env=environ).stdout
    sections = dict(re.findall(r"^([A-Z][A-Z -]+)\n(.*?)(?=^\S|\Z)", shown, re.MULTILINE | re.DOTALL))
    for name, _, command in command_pages.subcommands(hbone.parser()):
        section = sections[f"COMMAND {name.upper()}"]
        assert f"usage: hbone {name}" not in section
        assert f"hbone {name}" in section
        for words, _, _ in command_pages.flags_of(command, of_all=False):
            assert words[-1] in section
    assert "hbone ssh -t hello.demo top\n" in sections["COMMAND SSH"]
    assert "scp file hello:\n" in sections["COMMAND SSH-CONFIG"]
    assert "HBONE_TOKENS" in sections["ENVIRONMENT VARIABLES"]
    assert re.search(r"^ +77 +the +far side refused", sections["EXIT CODES"], re.MULTILINE)


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

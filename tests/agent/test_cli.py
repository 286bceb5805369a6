"""The `krun` command: help, wrong settings, and what it hands to the app."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from agent.cli import run
from agent.config.settings import ENVIRONMENT
from shared.errors import EXIT_OK, EXIT_USAGE
from tests.support.process import started

NO_PORTS = {"HBONE_LISTEN": "127.0.0.1:0", "HBONE_INBOUND": "none"}
"""The customary ports may be another run's."""


@pytest.mark.parametrize("argument", ["--help", "-h"])
def test_help_tells_every_variable(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([argument], {}) == EXIT_OK
    out = capsys.readouterr().out
    assert out.startswith("usage: krun [flags] [--] [COMMAND [ARG ...]]\n")
    for name, meaning in ENVIRONMENT.items():
        assert f"  {name} " in out
        assert f"  {meaning}\n" in out


def test_flags_of_its_own_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"HBONE_LISTEN": "nowhere"}  # which nobody looks at
    assert run(["--version"], wrong) == EXIT_OK
    said = r"krun \S+ \((?:not )?compiled, Python 3\.\d+\.\d+, OpenSSL .+\)\n"
    assert re.fullmatch(said, capsys.readouterr().out)
    assert run(["--version", "server", "--port"], wrong) == EXIT_OK
    assert capsys.readouterr().out.startswith("krun ")


@pytest.mark.parametrize("flag", ["--verison", "-v", "--listen=127.0.0.1:0"])
def test_a_flag_that_is_none(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([flag, "server"], {}) == EXIT_USAGE
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err == (
        f"krun: unrecognized arguments: {flag}; see krun --help; settings are environment variables\n"
    )


async def test_a_flag_goes_over_its_variable() -> None:
    environ = {"HBONE_LOG_LEVEL": "error", "HBONE_LOG_FORMAT": "text"}
    flags = ("--log-level", "info", "--log-format=json")
    async with started("agent", *flags, "sh", "-c", "exit 3", environ=environ) as process:
        code, _, err = await process.ended()
    assert code == 3
    assert err.startswith('{"severity":"INFO",')


async def test_behind_two_dashes_is_the_command(tmp_path: Path) -> None:
    program = tmp_path / "--version"
    program.write_text("#!/bin/sh\necho mine $1\n")
    program.chmod(0o755)
    environ = {**NO_PORTS, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    async with started("agent", "--", "--version", "--", environ=environ) as process:
        code, out, _ = await process.ended()
    assert (code, out) == (EXIT_OK, "mine --\n")


async def test_a_command_s_own_version_is_the_command_s() -> None:
    async with started("agent", "echo", "--version", environ=NO_PORTS) as process:
        _, out, _ = await process.ended()
    assert out.startswith("echo (GNU coreutils)") or out == "--version\n"


async def test_help_with_a_command_is_the_commands() -> None:
    command = ("sh", "-c", 'echo "$1"', "sh", "--help")
    async with started("agent", *command, environ=NO_PORTS) as process:
        code, out, _ = await process.ended()
    assert (code, out) == (EXIT_OK, "--help\n")


async def test_arguments_and_environment_are_the_commands_own() -> None:
    script = 'echo "$1|$2|$OWN|$PORT"'
    environ = {**NO_PORTS, "OWN": "a b", "HBONE_APP": "127.0.0.1:8123"}
    async with started("agent", "sh", "-c", script, "sh", "", "x y", environ=environ) as process:
        code, out, _ = await process.ended()
    assert (code, out) == (EXIT_OK, "|x y|a b|8123\n")


def test_explain_prints_settings_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--log-level=debug", "explain"], {"HBONE_APP": "127.0.0.1:8123"}) == EXIT_OK
    out, err = capsys.readouterr()
    assert err == ""
    assert re.search(r"^  HBONE_APP +environment +127\.0\.0\.1:8123$", out, re.MULTILINE)
    assert re.search(r"^  HBONE_LOG_LEVEL +flag +debug$", out, re.MULTILINE)


def test_explain_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain"], {"HBONE_APP": "nowhere"}) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("krun: invalid HBONE_APP=nowhere")


async def test_an_app_called_explain(tmp_path: Path) -> None:
    program = tmp_path / "explain"
    program.write_text("#!/bin/sh\necho mine\n")
    program.chmod(0o755)
    environ = {**NO_PORTS, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    async with started("agent", "--", "explain", environ=environ) as process:
        _, out, _ = await process.ended()
    assert out == "mine\n"

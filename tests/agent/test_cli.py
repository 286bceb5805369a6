"""The `krun` command: help, wrong settings, and what it hands to the app."""

from __future__ import annotations

import pytest

from agent.cli import run
from agent.settings import ENVIRONMENT
from shared.errors import EXIT_OK, EXIT_USAGE
from tests.support.process import started


@pytest.mark.parametrize("argument", ["--help", "-h"])
def test_help_tells_every_variable(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([argument], {}) == EXIT_OK
    out = capsys.readouterr().out
    assert out.startswith("usage: krun [COMMAND [ARG ...]]\n")
    for name, meaning in ENVIRONMENT.items():
        assert f"  {name} " in out
        assert f"  {meaning}\n" in out


def test_a_wrong_setting_comes_before_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["true"], {"HBONE_LISTEN": "nowhere"}) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("krun: invalid HBONE_LISTEN=nowhere (")


async def test_help_with_a_command_is_the_commands() -> None:
    async with started("agent", "sh", "-c", 'echo "$1"', "sh", "--help") as process:
        code, out, _ = await process.ended()
    assert (code, out) == (EXIT_OK, "--help\n")


async def test_arguments_and_environment_are_the_commands_own() -> None:
    script = 'echo "$1|$2|$OWN|$PORT"'
    environ = {"OWN": "a b", "HBONE_APP": "127.0.0.1:8123"}
    async with started("agent", "sh", "-c", script, "sh", "", "x y", environ=environ) as process:
        code, out, _ = await process.ended()
    assert (code, out) == (EXIT_OK, "|x y|a b|8123\n")

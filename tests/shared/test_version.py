"""What a command says of its version."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import ssl
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shared import version

ROOT = Path(__file__).parents[2]


def test_the_distribution_s_python_s_and_openssl_s() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert version.describe("krun") == (
        f"krun {project['version']} (Python {platform.python_version()}, {ssl.OPENSSL_VERSION})"
    )


def test_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    assert version.describe("hgate").startswith("hgate of a checkout that is not installed (Python ")


@pytest.mark.parametrize(
    ("command", "package"), [("hgate", "gateway"), ("krun", "agent"), ("hbone", "hbone")]
)
def test_every_command_says_it(command: str, package: str) -> None:
    asked = [sys.executable, "-m", package, "--version"]
    ran = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.fullmatch(rf"{command} \S+ \(Python .+, OpenSSL .+\)\n", ran.stdout)

"""What a command says of its version."""

from __future__ import annotations

import importlib.metadata
import json
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
    compiled = "compiled" if version.is_compiled() else "not compiled"
    assert version.describe("krun") == (
        f"krun {project['version']} ({compiled}, Python {platform.python_version()}, {ssl.OPENSSL_VERSION})"
    )


def test_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    assert version.describe("hgate").startswith("hgate of a checkout that is not installed (")


@pytest.mark.parametrize(
    ("command", "package"), [("hgate", "gateway"), ("krun", "agent"), ("hbone", "hbone")]
)
def test_every_command_says_it(command: str, package: str) -> None:
    asked = [sys.executable, "-m", package, "--version"]
    ran = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.fullmatch(rf"{command} \S+ \((?:not )?compiled, Python .+, OpenSSL .+\)\n", ran.stdout)


# An OpenSSL that leaves the CPU unused.

WITH_VAES = "processor\t: 0\nflags\t\t: fpu aes avx2 vaes vpclmulqdq\n"
WITHOUT = "processor\t: 0\nflags\t\t: fpu aes avx2\n"


@pytest.mark.parametrize(
    ("openssl", "cpuinfo", "text"),
    [
        ((3, 0, 22, 0, 0), WITH_VAES, "OpenSSL 3.0 does not use this CPU's VAES"),
        ((3, 1, 0, 0, 0), WITH_VAES, "OpenSSL 3.1 does not use this CPU's VAES"),
        ((1, 1, 1, 0, 0), WITH_VAES, "OpenSSL 1.1 does not use this CPU's VAES"),
        ((3, 2, 0, 0, 0), WITH_VAES, ""),
        ((4, 0, 0, 0, 0), WITH_VAES, ""),
        ((3, 0, 22, 0, 0), WITHOUT, ""),
        ((3, 0, 22, 0, 0), None, ""),
    ],
)
def test_an_openssl_that_leaves_the_cpu_unused(
    tmp_path: Path, openssl: tuple[int, ...], cpuinfo: str | None, text: str
) -> None:
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(cpuinfo)
    said = version.slow_openssl(openssl, path)
    assert said.startswith(text)
    assert bool(said) is bool(text)


@pytest.mark.parametrize(("command", "package"), [("hgate", "gateway"), ("hbone", "hbone")])
def test_the_same_as_json(command: str, package: str) -> None:
    asked = [sys.executable, "-m", package, "version", "--json"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout
    assert json.loads(said) == {
        "command": command,
        "version": version.installed(),
        "compiled": version.is_compiled(),
        "python": platform.python_version(),
        "openssl": ssl.OPENSSL_VERSION,
        "system": "Linux",
        "machine": platform.machine(),
    }

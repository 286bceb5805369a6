"""Other Pythons of this machine, for what may depend on the version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PATIENCE_S = 60

_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


@cache
def find(version: str) -> str | None:
    """The program of Python `version` (`3.13`): ours, one on the path, or one of pyenv's; None: there is
    none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [
        sys.executable,
        shutil.which(f"python{version}"),
        f"/usr/bin/python{version}",
        *sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python{version}")), reverse=True),
    ]
    return next((program for program in candidates if program and _says(program) == version), None)


def demand(version: str) -> str:
    """The same; without one the test is skipped."""
    found = find(version)
    if found is None:
        pytest.skip(f"no Python {version} on this machine")
    return found


def _says(program: str) -> str:
    """Its version; "" if it cannot be run, as pyenv's stand-ins for versions that are not chosen."""
    try:
        done = subprocess.run(
            [program, "-I", "-c", _VERSION], capture_output=True, text=True, timeout=PATIENCE_S
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

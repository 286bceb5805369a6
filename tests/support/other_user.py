"""Another user of the machine, who is nobody: for what one user may do to another one's files."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PATIENCE_S = 60.0

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


def ids() -> tuple[int, int]:
    """User and group id of nobody."""
    found = pwd.getpwnam("nobody")
    return found.pw_uid, found.pw_gid


def start(*command: str | Path) -> subprocess.Popen[str]:
    """Starts a program as nobody."""
    user, group = ids()
    return subprocess.Popen(
        [str(part) for part in command],
        user=user,
        group=group,
        extra_groups=(),
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*command: str | Path) -> str:
    """Runs a program as nobody, to its good end; what it says on standard output."""
    process = start(*command)
    output, complaint = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, complaint
    return output


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder like /tmp, which everybody can reach and write to."""
    folder = Path(tempfile.mkdtemp(prefix="hbone-test-", dir="/tmp"))
    try:
        folder.chmod(0o1777)
        yield folder
    finally:
        shutil.rmtree(folder)

"""Limits that are ours alone, in a process of its own."""

from __future__ import annotations

import resource
import subprocess
import sys

SCRIPT = """
import os, resource, subprocess
from shared import core_dumps, open_files, resource_limits

_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, ({core}, hard))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {files}))
core_dumps.forbid({{}})
assert open_files.allow_many() == {files}

def of_a_program():
    print(*subprocess.check_output(["sh", "-c", "ulimit -c; ulimit -n"], text=True).split())

of_a_program()
with resource_limits.as_started():
    of_a_program()
of_a_program()
try:
    with resource_limits.as_started():
        raise KeyError
except KeyError:
    of_a_program()
resource_limits.set_soft(resource.RLIMIT_NOFILE, 100)
with resource_limits.as_started():
    of_a_program()
"""


def test_programs_can_have_the_limits_that_we_were_started_with() -> None:
    hard_core = resource.getrlimit(resource.RLIMIT_CORE)[1]
    core = 4096 if hard_core < 0 else min(4096, hard_core)
    files = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 512)
    script = SCRIPT.format(core=core, files=files)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    ours, theirs = f"0 {files}", f"{core // 512} 64"
    assert (done.stdout.splitlines(), done.stderr) == ([ours, theirs, ours, ours, theirs], "")

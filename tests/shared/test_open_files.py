"""The limit of open files, raised in a process of its own."""

from __future__ import annotations

import resource
import subprocess
import sys

SCRIPT = """
import resource
from shared.open_files import allow_many
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))
assert allow_many() == {hard}
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_soft_limit_becomes_the_hard_one() -> None:
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 512)
    script = SCRIPT.format(hard=hard)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr) == ([str(hard)] * 2, "")

from __future__ import annotations

import os
import subprocess
import sys

from bench.accounting import cpu_seconds, descendants, proportional_bytes, resident_bytes

BUSY_S = 0.2


def test_cpu_time_of_a_process_that_is_at_work() -> None:
    script = f"import time\nwhile time.process_time() < {BUSY_S}: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        assert BUSY_S <= cpu_seconds(busy.pid) < 20 * BUSY_S
        assert busy.pid in descendants(os.getpid())
        busy.communicate(b"\n")


def test_memory_of_ourselves() -> None:
    before = resident_bytes(os.getpid())
    held = bytearray(os.urandom(1)) * (32 << 20)
    assert resident_bytes(os.getpid()) - before > len(held) * 3 // 4
    assert 0 < proportional_bytes(os.getpid()) <= resident_bytes(os.getpid())

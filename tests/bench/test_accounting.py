from __future__ import annotations

import os
import subprocess
import sys

import pytest

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


def test_memory_of_a_process_that_takes_some() -> None:
    script = "print(flush=True)\ninput()\nheld = b'x' * (32 << 20)\nprint(flush=True)\ninput()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as taker:
        assert taker.stdin is not None
        assert taker.stdout is not None
        taker.stdout.readline()
        before = resident_bytes(taker.pid)
        taker.stdin.write(b"\n")
        taker.stdin.flush()
        taker.stdout.readline()
        assert resident_bytes(taker.pid) - before == pytest.approx(32 << 20, rel=0.1)
        assert 0 < proportional_bytes(taker.pid) <= resident_bytes(taker.pid)
        taker.communicate(b"\n")

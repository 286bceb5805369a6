"""What the kernel says of a process: CPU time and memory. Linux only, as the rest."""

from __future__ import annotations

import re
import time
from pathlib import Path

# A process's CPU clock as clock_getcpuclockid(3) makes its number. It counts nanoseconds of all threads, the
# ended ones too, where /proc/PID/stat counts ticks of 10 ms.
_CLOCK_OF_PROCESS = 2


def cpu_seconds(pid: int) -> float:
    """CPU time that the process and all its threads have had, in seconds."""
    return time.clock_gettime((~pid << 3) | _CLOCK_OF_PROCESS)


def descendants(pid: int) -> list[int]:
    """The process and the processes under it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += descendants(int(child))
    return found


def resident_bytes(pid: int) -> int:
    """Memory of the process that is in RAM (RSS)."""
    return _kib(pid, "Rss") << 10


def proportional_bytes(pid: int) -> int:
    """The same with what several processes share divided among them (PSS)."""
    return _kib(pid, "Pss") << 10


def _kib(pid: int, name: str) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1])

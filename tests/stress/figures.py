"""What the kernel tells of another process: memory, descriptors, threads, CPU time (proc(5))."""

from __future__ import annotations

import asyncio
import math
import os
import resource
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.accounting import cpu_seconds, proportional_bytes, resident_bytes
from shared.tasks import spawn

PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024

SAMPLE_S = 0.05
"""Between two looks at a process's memory: a flood fills a megabyte in a few milliseconds, but what it makes
a process keep stays for long."""

POLL_S = 0.05
"""Between two looks at something that only polling can show."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One look at a process."""

    rss_kib: int
    pss_kib: int
    """Shared pages count in proportion: what the process costs beside others of its kind."""
    descriptors: int
    threads: int
    cpu_s: float
    """User and system time since its start."""


def look(pid: int) -> Figures:
    """The figures of a process. Raises OSError if it is gone."""
    return Figures(
        rss_kib=resident_bytes(pid) >> 10,
        pss_kib=proportional_bytes(pid) >> 10,
        descriptors=descriptors(pid),
        threads=len(os.listdir(f"/proc/{pid}/task")),
        cpu_s=cpu_seconds(pid),
    )


def descriptors(pid: int) -> int:
    """How many files a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def rss_kib(pid: int) -> int:
    """Resident memory; far cheaper than `look`."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_KIB


class Peak:
    """The most memory that processes had while it was watched."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._before = [rss_kib(pid) for pid in pids]
        self._most = list(self._before)

    @property
    def growth_kib(self) -> int:
        """By how much the process that grew most did so."""
        return max(most - before for most, before in zip(self._most, self._before, strict=True))

    def sample(self) -> None:
        """Looks once."""
        for number, pid in enumerate(self._pids):
            self._most[number] = max(self._most[number], rss_kib(pid))


@asynccontextmanager
async def watched(*pids: int) -> AsyncIterator[Peak]:
    """Samples the memory of these processes until the block ends."""
    peak = Peak(pids)

    async def sample() -> None:
        while True:
            peak.sample()
            await asyncio.sleep(SAMPLE_S)

    task = spawn(sample(), name="watch memory")
    try:
        yield peak
        peak.sample()
    finally:
        task.cancel()


def limit_descriptors(pid: int, count: int) -> None:
    """Gives a running process a new soft limit of open files (prlimit(2)); its hard limit stays."""
    hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, hard))


async def settled(reached: Callable[[], bool], timeout_s: float) -> bool:
    """Polls until something is `reached`; False if it was not within `timeout_s` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not reached():
        if loop.time() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of all lie; NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(len(ordered) * share) - 1)]

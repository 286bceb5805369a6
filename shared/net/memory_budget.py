"""How many bytes a process holds for all its peers together, and what is done when they are too many.

Owned here: the sum, the mark, and who has to go. What one tunnel may hold is bounded where it is held: by a
leg's mark and its stream's window (`legs.py`, rule 2). Ten thousand times that is more than a machine has.

The rules:

1. The sum is taken by looking at everybody now and then, so nothing is counted while bytes pass. Between two
   looks, `CALM_S` apart or `TENSE_S` from half the mark on, a process can take in what the network brings it.
2. Above the mark no connection is taken (`full`, which whoever accepts asks). Open tunnels go on: a peer
   that reads empties what we hold for it, and one that does not makes us stop reading its other side.
3. Above `RESET_AT` times the mark those that hold most are reset, until the rest is below the mark, as
   Envoy's overload manager does. For a peer that reads as fast as it is sent to nothing is held, so it is
   not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from shared.errors import HboneError, OverloadError
from shared.net.sweep import Sweep

CALM_S = 1.0
"""Between two looks: below half a microsecond a tunnel, so with 10,000 of them below 0.5 % of a CPU."""

TENSE_S = 0.1
"""The same when more than half the mark is held."""

TENSE_AT = 0.5

RESET_AT = 1.1
"""Above the mark by as much as it takes not to reset for what a moment brings."""

DEFAULT_SHARE = 2
"""The mark is one part in so many of the memory that we may use, if nobody has set it: the rest is for the
process itself, 4 KiB a tunnel, and for the kernel's socket buffers, which a container pays for, too."""

_CGROUP_FILES = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Of version 2 and of version 1, as a container sees its own."""

_MEMINFO = "proc/meminfo"


class Holder(Protocol):
    """What holds bytes for peers."""

    @property
    def buffered_bytes(self) -> int:
        """How many it holds now."""

    def abort(self, error: HboneError) -> None:
        """Resets it; does nothing if it is over."""


class MemoryBudget:
    """Adds up what `holders()` hold, and `others()` bytes that nobody of them counts. `most_bytes` is the
    mark, which may be changed at any time; 0: none."""

    def __init__(
        self,
        most_bytes: int,
        holders: Callable[[], Iterable[Holder]],
        others: Callable[[], int] = lambda: 0,
    ) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        """As of the last look."""
        self._others = others
        self._sum = 0
        self._sizes: list[tuple[int, Holder]] = []
        self._sweep: Sweep[Holder] = Sweep(holders, self._look, interval_s=self._interval, done=self._done)

    @property
    def full(self) -> bool:
        """Whether no connection should be taken now."""
        return 0 < self.most_bytes < self.held_bytes

    def start(self) -> None:
        """From now on looks."""
        self._sweep.start()

    def close(self) -> None:
        """Looks no more."""
        self._sweep.stop()

    def _interval(self) -> float:
        return TENSE_S if self.most_bytes and self.held_bytes > TENSE_AT * self.most_bytes else CALM_S

    def _look(self, holder: Holder) -> None:
        size = holder.buffered_bytes
        if size:
            self._sum += size
            self._sizes.append((size, holder))

    def _done(self) -> None:
        held, self._sum = self._sum + self._others(), 0
        sizes, self._sizes = self._sizes, []
        if 0 < self.most_bytes * RESET_AT < held:
            held = self._reset_largest(held, sizes)
        self.held_bytes = held

    def _reset_largest(self, held: int, sizes: list[tuple[int, Holder]]) -> int:
        """What is left after it."""
        sizes.sort(key=lambda item: item[0], reverse=True)
        total = held
        for size, holder in sizes:
            if held <= self.most_bytes:
                break
            text = (
                f"it holds {size} of {total} bytes, which are more than the {self.most_bytes} of max_buffered"
            )
            holder.abort(OverloadError(text))
            held -= size
        return held


def default_most_bytes(root: Path = Path("/")) -> int:
    """A `DEFAULT_SHARE` of the memory that the container, or else the machine, has; 0 if nobody knows."""
    limits = []
    for name in _CGROUP_FILES:
        text = _text(root / name)
        if text.isdigit():  # "max" is none
            limits.append(int(text))
    for line in _text(root / _MEMINFO).splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            limits.append(int(value.split()[0]) * 1024)
    return min(limits, default=0) // DEFAULT_SHARE


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""

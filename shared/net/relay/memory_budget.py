"""How many bytes a process holds for all its peers together, and what is done when they are too many.

What one tunnel may hold is bounded by its leg's mark and its stream's window. Ten thousand times that is more
than a machine has.

The rules:

1. Everybody is checked now and then and the sum made of that, so nothing is counted while bytes pass. Between
   two checks a process can receive what the network brings it; `may_come` says how much that is at most.
   Checks are `CALM_S` apart; `TENSE_S` if half the mark is held, or more than the mark may come; `URGENT_S`
   if both.
2. Above the mark no connection is accepted: whoever accepts asks `full`. Open tunnels go on: a peer
   that reads empties what we hold for it, and one that does not makes us stop reading its other side.
3. Above `RESET_AT` times the mark those that hold most are reset, until the rest is below the mark, as
   Envoy's overload manager does. For a peer that reads as fast as it is sent to nothing is held, so it is
   not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shared.errors import HboneError, LimitError, OverloadError
from shared.net.relay.sweep import Sweep

CALM_S = 1.0
"""Between two checks, of half a microsecond a tunnel: with 10,000 of them below 0.5 % of a CPU."""

TENSE_S = 0.1
"""The same when more than half the mark is held."""

URGENT_S = 0.02
"""The same when, beside that, the open windows of all peers let more come than the mark."""

TENSE_AT = 0.5

GROWTH_SHARE = 0.5
"""Of the mark, for receive windows that have grown: the other half is for what all others hold."""

UNBOUNDED_GROWTH_BYTES = 1 << 30
"""How far they may grow without a mark."""

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


@dataclass
class Part:
    """Holders that may have a share of the mark only, and leave the rest to others. Above it no new one is
    accepted, above `RESET_AT` times it those of them that hold most are reset."""

    has: Callable[[Holder], bool]
    """Whether a holder is one of them."""

    share: float
    """Of the mark; times `RESET_AT` it has to be less than 1."""

    name: str
    """What they are, as in "for uploads"."""

    held_bytes: int = 0
    """What they held at the last check."""


class MemoryBudget:
    """Adds up what `holders()` hold, and `others()` bytes that nobody of them counts. `most_bytes` is the
    mark, which may be changed at any time; 0: none. `setting` is the name under which it is set, `may_come()`
    how many bytes the open windows of all peers come to, `part` who may have a share of it only."""

    def __init__(
        self,
        most_bytes: int,
        holders: Callable[[], Iterable[Holder]],
        others: Callable[[], int] = lambda: 0,
        setting: str = "max_buffered",
        may_come: Callable[[], int] = lambda: 0,
        part: Part | None = None,
    ) -> None:
        self._setting = setting
        self._part = part
        self._may_come = may_come
        self.most_bytes = most_bytes
        self.held_bytes = 0
        """As of the last check."""
        self._others = others
        self._sum = 0
        self._sizes: list[tuple[int, Holder]] = []
        self._sweep: Sweep[Holder] = Sweep(holders, self._check, interval_s=self._interval, done=self._done)

    @property
    def full(self) -> bool:
        """Whether no connection should be accepted now."""
        return 0 < self.most_bytes < self.held_bytes

    @property
    def growth_bytes(self) -> int:
        """How far receive windows may grow, all together: not at all while much is held."""
        if not self.most_bytes:
            return UNBOUNDED_GROWTH_BYTES
        much_held = self.held_bytes > TENSE_AT * self.most_bytes
        return 0 if much_held else int(self.most_bytes * GROWTH_SHARE)

    def refusal(self) -> LimitError | None:
        """Why nothing new is accepted now; None while it is."""
        if not self.full:
            return None
        text = f"{self.held_bytes} bytes are held for all peers, {self._too_much(self.most_bytes)}"
        return LimitError(text, self._setting)

    def part_refusal(self) -> LimitError | None:
        """Why nothing new that would belong to the part is accepted now; None while it is."""
        part, most = self._part, self._part_most_bytes
        if self.full or part is None or not 0 < most < part.held_bytes:
            return self.refusal()
        text = f"{part.held_bytes} bytes are held for {part.name}, {self._too_much(most, part)}"
        return LimitError(text, self._setting)

    @property
    def _part_most_bytes(self) -> int:
        return 0 if self._part is None else int(self.most_bytes * self._part.share)

    def _too_much(self, most_bytes: int, part: Part | None = None) -> str:
        share = "" if part is None else f"{part.share:.0%} of "
        return f"which are more than the {most_bytes} of {share}{self._setting}"

    def start(self) -> None:
        """From now on checks."""
        self._sweep.start()

    def close(self) -> None:
        """Checks no more."""
        self._sweep.stop()

    def _interval(self) -> float:
        most = self.most_bytes
        if not most:
            return CALM_S
        much_held, much_may_come = self.held_bytes > TENSE_AT * most, self._may_come() > most
        if much_held and much_may_come:
            return URGENT_S
        return TENSE_S if much_held or much_may_come else CALM_S

    def _check(self, holder: Holder) -> None:
        size = holder.buffered_bytes
        if size:
            self._sum += size
            self._sizes.append((size, holder))

    def _done(self) -> None:
        held, self._sum = self._sum + self._others(), 0
        sizes, self._sizes = self._sizes, []
        sizes.sort(key=lambda item: item[0], reverse=True)
        if self._part is not None:
            of_part = [item for item in sizes if self._part.has(item[1])]
            held_by_part = sum(size for size, _ in of_part)
            left, gone = self._reset_largest(held_by_part, of_part, self._part_most_bytes, self._part)
            self._part.held_bytes = left
            held -= held_by_part - left
            sizes = [item for item in sizes if item not in gone] if gone else sizes
        self.held_bytes, _ = self._reset_largest(held, sizes, self.most_bytes)

    def _reset_largest(
        self, held: int, sizes: list[tuple[int, Holder]], most_bytes: int, part: Part | None = None
    ) -> tuple[int, list[tuple[int, Holder]]]:
        """Resets those that hold most, if `held` is far too much; what is left then, and who has gone.
        `sizes` begins with the largest."""
        gone: list[tuple[int, Holder]] = []
        if not 0 < most_bytes * RESET_AT < held:
            return held, gone
        total = held
        for item in sizes:
            if held <= most_bytes:
                break
            size, holder = item
            text = f"it holds {size} of {total} bytes, {self._too_much(most_bytes, part)}"
            holder.abort(OverloadError(text))
            gone.append(item)
            held -= size
        return held, gone


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

"""Files that others write: whether they have changed since they were read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple


class Stamp(NamedTuple):
    """Changes whenever the file does: written over, replaced, or behind a symbolic link that moved on."""

    mtime_ns: int
    size: int
    inode: int
    device: int
    ctime_ns: int


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a file that `stat` was asked about."""
    return Stamp(status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev, status.st_ctime_ns)


def stamp(file: str | os.PathLike[str]) -> Stamp | None:
    """The stamp of `file` now; None if it is not there, or not to be seen."""
    try:
        return stamp_of(os.stat(file))
    except OSError:
        return None


class WatchedFiles:
    """Files and their stamps as last noted. Call `note` before the files are read, so that the next `changed`
    finds what changes in between."""

    def __init__(self, files: Iterable[str | os.PathLike[str]]) -> None:
        self._files = tuple(files)
        self._noted: tuple[Stamp | None, ...] | None = None

    def changed(self) -> bool:
        """Whether one of them has changed since `note`; True before the first, and after `forget`."""
        return self._noted is None or self._now() != self._noted

    def note(self) -> None:
        """Notes how they are now."""
        self._noted = self._now()

    def forget(self) -> None:
        """They have to be read again, changed or not."""
        self._noted = None

    def _now(self) -> tuple[Stamp | None, ...]:
        return tuple(map(stamp, self._files))

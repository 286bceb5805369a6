"""Replaces the files of a folder all at once, as kubelet replaces those of a mounted Secret.

    password              -> ..data/password       and so on: links that never change
    ..data                -> ..1732104000000000000          the link that is replaced, by rename
    ..1732104000000000000/   password, user

Several files cannot be renamed at once, but a link can: a reader sees all of the old ones or all of the new
ones, unless it opens one before the rename and the next one after it. The version before stays until the next
rename, for readers that have followed the link already.

A folder has one writer at a time. What others have put into it stays, unless it has the name of a new file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shared.atomic_files import PUBLIC_MODE, write_atomically

DATA = "..data"
_VERSION_PREFIX = ".."
_TURNING = "..data_tmp"
FOLDER_MODE = 0o755


@dataclass(frozen=True, slots=True)
class Content:
    """Of one file; kept out of `repr`, for it may be a secret."""

    content: bytes = field(repr=False)
    mode: int = PUBLIC_MODE


def write(folder: Path, files: Mapping[str, Content], owner: tuple[int, int] | None = None) -> None:
    """Makes `files` those of `folder`, by name; the folder is made if it is missing. `owner` is a user and a
    group id for the files, None: ours. A file of ours that has no new content is removed.

    Raises OSError when the folder cannot be made or written; then what was there is there still.
    """
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    before = current_version(folder)
    version = _new_version(folder)
    try:
        for name, file in files.items():
            write_atomically(version / name, file.content, file.mode, owner)
        _link(folder, DATA, version.name)
    except BaseException:
        shutil.rmtree(version, ignore_errors=True)
        raise
    for name in files:
        # The first time only, so links turn one by one only where something else was before.
        if not _leads_to(folder / name, f"{DATA}/{name}"):
            _link(folder, name, f"{DATA}/{name}")
    _forget_others(folder, files, {version.name, before})


def current_version(folder: Path) -> str:
    """The name of the sub-folder that is in use, "" if the folder has none of ours."""
    try:
        return os.readlink(folder / DATA)
    except OSError:
        return ""


def _new_version(folder: Path) -> Path:
    # By the clock, so that a listing is in order; one that runs backwards finds the name taken at worst.
    number = time.time_ns()
    while True:
        version = folder / f"{_VERSION_PREFIX}{number}"
        try:
            version.mkdir()
        except FileExistsError:
            number += 1
        else:
            version.chmod(FOLDER_MODE)  # whatever our umask is: others than us read some of the files
            return version


def _link(folder: Path, name: str, target: str) -> None:
    turning = folder / _TURNING
    with contextlib.suppress(FileNotFoundError):
        turning.unlink()
    turning.symlink_to(target)
    turning.rename(folder / name)


def _leads_to(link: Path, target: str) -> bool:
    try:
        return os.readlink(link) == target
    except OSError:
        return False


def _forget_others(folder: Path, files: Mapping[str, Content], versions: set[str]) -> None:
    """Removes links of ours that lead nowhere now, and versions that nobody can be reading any more. Of the
    latter what cannot be removed is left."""
    for entry in list(folder.iterdir()):
        is_version = entry.name.startswith(_VERSION_PREFIX) and entry.name[2:].isdigit()
        if is_version and entry.name not in versions:
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name not in files and _leads_to(entry, f"{DATA}/{entry.name}"):
            entry.unlink()

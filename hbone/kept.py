"""What is kept between two runs of `hbone`, in the user's cache folder: the URLs of services, and ID tokens
that took long to get.

A file for each, which only its user can read, in a folder that nobody else can change
(`shared.private_folder`). What cannot be read, is malformed, too old or of another question counts as not
there; what cannot be written is not kept, and is no error: everything here can be had anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shared.errors import UnavailableError
from shared.private_folder import PrivateFolder
from shared.watched_file import stamp

MAX_FILE_BYTES = 64 * 1024
MAX_FILES = 200
"""In the folder; the oldest make room."""

FILE_MODE = 0o600
ENDING = ".json"


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Where this user's caches are: XDG_CACHE_HOME, or what the system has for it; None without a home."""
    named = environ.get("XDG_CACHE_HOME", "")
    if named.startswith("/"):  # a relative one is to be ignored (XDG Base Directory Specification)
        return Path(named, "hbone")
    home = environ.get("HOME", "")
    if not home.startswith("/"):
        return None
    return Path(home, "Library/Caches" if sys.platform == "darwin" else ".cache", "hbone")


def state_of(files: Iterable[Path]) -> list[list[int] | None]:
    """What changes when one of the files does, for the question of something that is made of them."""
    return [None if (found := stamp(file)) is None else list(found) for file in files]


class Kept:
    """One folder of such files."""

    def __init__(self, folder: Path | None, now: Callable[[], float] = time.time) -> None:
        """None: nothing is kept. `now` gives seconds since 1970."""
        self._folder = folder
        self._now = now
        self.trouble = ""
        """Why the last answer could not be kept."""

    def get(self, question: object) -> Any:
        """What is kept for `question`, which JSON can write; None if there is nothing that is still good."""
        if self._folder is None or not os.path.isdir(self._folder):
            return None
        try:
            with PrivateFolder(self._folder) as folder:
                content = folder.read(_file(question), MAX_FILE_BYTES, secret=True)
            found = json.loads(content)
            ends_at_s = found["ends"]
            # A clock that was set back must not keep it for longer than it was to be kept.
            good = found["question"] == _digest(question) and found["made"] <= self._now() < ends_at_s
            return found["answer"] if good else None
        except (OSError, UnavailableError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def put(self, question: object, answer: object, ends_at_s: float) -> None:
        """Keeps `answer` until `ends_at_s`, in seconds since 1970."""
        if self._folder is None:
            return
        found = {"question": _digest(question), "answer": answer, "made": self._now(), "ends": ends_at_s}
        content = json.dumps(found).encode()
        if len(content) > MAX_FILE_BYTES:
            return
        try:
            with PrivateFolder(self._folder) as folder:
                _make_room(folder.fileno())
                folder.write(_file(question), content, FILE_MODE)
        except (OSError, UnavailableError) as error:
            self.trouble = str(error)

    def drop(self, question: object) -> None:
        """Keeps it no more."""
        if self._folder is None or not os.path.isdir(self._folder):
            return
        with contextlib.suppress(OSError, UnavailableError), PrivateFolder(self._folder) as folder:
            os.unlink(_file(question), dir_fd=folder.fileno())


def _digest(question: object) -> str:
    """In place of the question, which may have paths and names that are nobody's business."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()


def _file(question: object) -> str:
    return _digest(question)[:32] + ENDING


def _make_room(folder: int) -> None:
    """Removes the oldest files, if there are too many. Raises OSError."""
    names = [name for name in os.listdir(folder) if name.endswith(ENDING)]
    if len(names) < MAX_FILES:
        return
    ages = sorted((os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime, name) for name in names)
    for _, name in ages[: len(names) - MAX_FILES + 1]:
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            os.unlink(name, dir_fd=folder)

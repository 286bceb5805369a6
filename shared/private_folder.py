"""A folder that no other user of the machine can change, nor put another one in the place of.

For what is worth as much as a key. Each component of the path is opened relative to the one before, and is
judged once it is open; so nobody can exchange something between the check and the use. The rules:

1. A folder on the way belongs to root or to us, and nobody else may write to it, unless it has the sticky
   bit, as /tmp has it: there nobody can rename or remove what is ours.
2. A symbolic link on the way belongs to root or to us. The folder itself is none, nor is a file in it.
3. The folder is ours, and neither its group nor others may write to it. One that is missing is made, with
   mode 0700, and so are those on the way.
4. A file in it is a regular one, ours, and nobody else may write to it; a secret one nobody else may read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Self

from shared.errors import UnavailableError

FOLDER_MODE = 0o700

MAX_LINKS = 40
"""Symbolic links on one path; Linux has the same bound (path_resolution(7))."""

# O_PATH takes no right to read the folder; macOS has none.
_ON_THE_WAY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ITSELF = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe is not waited for
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_WRITE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ANY_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def runtime_folder(named: Path | None) -> Path:
    """Where programs of this user keep what they share among themselves only: below `named`, which is
    $XDG_RUNTIME_DIR, or the folder that systemd makes for each user who is logged in, or /tmp.

    `named` is passed over if it is not ours, as it is after `su`. Nothing is made here.
    """
    user = os.geteuid()
    for folder in (named, Path(f"/run/user/{user}")):
        if folder is not None and folder.is_absolute() and _is_private(folder, user):
            return folder / "hbone"
    return Path(f"/tmp/hbone-{user}")


class PrivateFolder:
    """An open one: a context manager, or to be closed."""

    def __init__(self, path: Path) -> None:
        """Opens `path`, and makes it if it is missing. Raises UnavailableError with what is wrong where."""
        self.path = path
        self._descriptor = _open(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of it, and so of a lock on it."""
        os.close(self._descriptor)

    def fileno(self) -> int:
        """Its descriptor, for a lock."""
        return self._descriptor

    def has(self, name: str) -> bool:
        """Whether there is anything of that name. Raises OSError when that cannot be told."""
        try:
            os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str, most_bytes: int, *, secret: bool) -> bytes:
        """The content of a file, `most_bytes` of it at most. `secret` says that nobody else may read it.
        Raises UnavailableError when it cannot be read, or breaks rule 4."""
        file = self.path / name
        try:
            descriptor = os.open(name, _FILE, dir_fd=self._descriptor)
            try:
                _check_file(os.fstat(descriptor), file, secret=secret)
                with os.fdopen(descriptor, "rb", closefd=False) as opened:
                    return opened.read(most_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UnavailableError(f"{file}: {_reason(error)}") from error

    def write(self, name: str, content: bytes, mode: int) -> None:
        """Replaces a file, which others see whole or not at all, and with `mode` from the start. Raises
        OSError when it cannot be written; then what was there is there still."""
        temporary = f".{name}.{secrets.token_hex(8)}"
        descriptor = os.open(temporary, _NEW_FILE, 0o600, dir_fd=self._descriptor)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                os.fchmod(file.fileno(), mode)
            os.rename(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._descriptor)
            raise


# The way.


def _open(path: Path) -> int:
    """The descriptor of the folder. Raises UnavailableError."""
    # From the end: what a link stands for takes its place.
    pending = _parts(os.path.join(os.getcwd(), path))
    if not pending:
        raise UnavailableError(f"{path} is no folder of its own")
    links = 0
    here, place = os.open("/", _ON_THE_WAY), Path("/")
    try:
        while pending:
            part = pending.pop()
            is_last = not pending
            there = place / part if part != ".." else place.parent
            target = _link_target(here, part, there)
            if target is not None:
                links += 1
                if is_last:
                    raise UnavailableError(f"{there} is a symbolic link")
                if links > MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                pending += _parts(target)
                if not target.startswith("/"):
                    continue
                opened, there = os.open("/", _ON_THE_WAY), Path("/")
            else:
                opened = os.open(part, _ITSELF if is_last else _ON_THE_WAY, dir_fd=here)
            os.close(here)
            here, place = opened, there
            if target is None:
                _check_folder(os.fstat(here), place, is_last=is_last)
    except BaseException as error:
        os.close(here)
        if isinstance(error, OSError):
            raise UnavailableError(f"{there}: {_reason(error)}") from error
        raise
    return here


def _parts(path: str) -> list[str]:
    """Its components from the last to the first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _link_target(folder: int, name: str, place: Path) -> str | None:
    """What `name` in the open `folder` leads to; None if it is no symbolic link. A missing folder is made.
    Raises OSError, and UnavailableError by rule 2."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # made by another process of ours, or looked at next
            os.mkdir(name, FOLDER_MODE, dir_fd=folder)
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISLNK(found.st_mode):
        return None
    if found.st_uid not in (0, os.geteuid()):
        raise UnavailableError(f"{place} is a symbolic link of {_user(found.st_uid)}")
    # In a folder that rule 1 allows nobody else can exchange a link of root's or ours for another one.
    return os.readlink(name, dir_fd=folder)


def _check_folder(found: os.stat_result, place: Path, *, is_last: bool) -> None:
    """Raises UnavailableError by rules 1 and 3."""
    user = os.geteuid()
    if found.st_uid != user and (is_last or found.st_uid != 0):
        raise UnavailableError(f"{place} belongs to {_user(found.st_uid)}, not to {_user(user)}")
    is_shared = not is_last and found.st_mode & stat.S_ISVTX
    if found.st_mode & _WRITE_BY_OTHERS and not is_shared:
        raise UnavailableError(
            f"{place} may be written by others than {_user(found.st_uid)} ({_mode(found)})"
        )


def _check_file(found: os.stat_result, file: Path, *, secret: bool) -> None:
    """Raises UnavailableError by rule 4."""
    if not stat.S_ISREG(found.st_mode):
        raise UnavailableError(f"{file} is no regular file")
    if found.st_uid != os.geteuid():
        raise UnavailableError(f"{file} belongs to {_user(found.st_uid)}, not to {_user(os.geteuid())}")
    if found.st_mode & (_ANY_BY_OTHERS if secret else _WRITE_BY_OTHERS):
        what = "read or written" if secret else "written"
        raise UnavailableError(f"{file} may be {what} by others than {_user(found.st_uid)} ({_mode(found)})")


def _is_private(folder: Path, user: int) -> bool:
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    is_folder = stat.S_ISDIR(found.st_mode)
    return is_folder and found.st_uid == user and not found.st_mode & _WRITE_BY_OTHERS


def _reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "a symbolic link, or too many of them"
    return error.strerror or str(error)


def _mode(found: os.stat_result) -> str:
    return f"mode {stat.S_IMODE(found.st_mode):04o}"


def _user(number: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:  # none of /etc/passwd, as in containers
        return f"user {number}"

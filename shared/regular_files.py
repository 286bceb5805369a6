"""Files that a user has named, read so that none of them can stop the process.

A named pipe blocks whoever opens it until somebody writes, a device may never end, and a file may be of any
size. So every file that a configuration, a variable or a flag names is opened without waiting, has to be a
regular file, and is read up to a bound. A file system that hangs (NFS) still hangs its reader.

Unless said otherwise, what is wrong is an OSError whose `strerror` says it, as with a file that is not there.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import UnavailableError

MAX_PEM_BYTES = 4 << 20
"""Certificates or keys in one file. A system's bundle of roots has 230 KiB."""

_DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def read(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The content of a regular file of at most `most_bytes`. Raises OSError."""
    return read_with_status(path, most_bytes)[0]


def read_needed(path: str | os.PathLike[str], most_bytes: int, what: str = "") -> bytes:
    """As `read`, but raises UnavailableError, which names the file, and `what` it is if that is given."""
    try:
        return read(path, most_bytes)
    except OSError as error:
        place = f"{what}: {os.fspath(path)}" if what else os.fspath(path)
        raise UnavailableError(f"{place}: {error.strerror or error}") from error


def read_with_status(path: str | os.PathLike[str], most_bytes: int) -> tuple[bytes, os.stat_result]:
    """As `read`, with what fstat says of this very file. Raises OSError."""
    descriptor, status = _open(path, most_bytes)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:  # it has grown, or says nothing of its size, as files of /proc do
        raise _too_large(path, most_bytes)
    return content, status


@contextmanager
def opened(path: Path, most_bytes: int = MAX_PEM_BYTES) -> Iterator[str]:
    """Another path to the same regular file, which stays that file whatever `path` becomes: for libraries
    that open files by themselves, such as OpenSSL. Raises OSError."""
    descriptor, _ = _open(path, most_bytes)
    try:
        yield f"{_DESCRIPTORS}/{descriptor}"
    finally:
        os.close(descriptor)


def _open(path: str | os.PathLike[str], most_bytes: int) -> tuple[int, os.stat_result]:
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno == errno.ENXIO:  # so open(2) says of a socket
            raise _not_regular(path, os.stat(path)) from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _not_regular(path, status)
        if status.st_size > most_bytes:
            raise _too_large(path, most_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status


def _not_regular(path: str | os.PathLike[str], status: os.stat_result) -> OSError:
    kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "something else")
    return OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))


def _too_large(path: str | os.PathLike[str], most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it is longer than {most_bytes} bytes", os.fspath(path))

"""Files for single values, which only their owner may read."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from shared.atomic_files import PRIVATE_MODE, write_atomically
from shared.errors import UnavailableError

PREFIX = "krun-"


class ValueFiles:
    """Those of one krun."""

    def __init__(self, owner: tuple[int, int] | None = None) -> None:
        """`owner` is a user and a group id for the files, None: ours."""
        self._owner = owner
        self._temporary: list[Path] = []

    def temporary(self, content: bytes, suffix: str) -> Path:
        """A new file, until `close`. Raises UnavailableError when it cannot be written."""
        try:
            descriptor, name = tempfile.mkstemp(prefix=PREFIX, suffix=suffix)
            self._temporary.append(Path(name))
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                if self._owner is not None:
                    os.fchown(file.fileno(), *self._owner)
        except OSError as error:
            raise UnavailableError(f"cannot write a temporary file: {error.strerror or error}") from error
        return Path(name)

    def at(self, path: Path, content: bytes) -> Path:
        """The file `path`, which is replaced. Raises UnavailableError when it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content, PRIVATE_MODE, self._owner)
        except OSError as error:
            raise UnavailableError(f"cannot write its destination: {error.strerror or error}") from error
        return path

    def close(self) -> None:
        """Removes the temporary ones."""
        for path in self._temporary:
            with contextlib.suppress(OSError):
                path.unlink()
        self._temporary.clear()

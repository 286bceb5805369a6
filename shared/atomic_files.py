"""Files that others read while we write them: each appears whole or not at all, and with its mode."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

PUBLIC_MODE = 0o644
PRIVATE_MODE = 0o600


def write_atomically(path: Path, content: bytes, mode: int, owner: tuple[int, int] | None = None) -> None:
    """Replaces `path` by a file with `content` and `mode`; `owner` is a user and a group id, None: ours. A
    symbolic link in its place is replaced, what it leads to stays.

    Raises OSError when the folder cannot be written or the file not be given away; then `path` is as it was.
    """
    # mkstemp opens the file with mode 0600, so a key is never readable by others, not even for a moment.
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if owner is not None:
                os.fchown(file.fileno(), *owner)
            os.fchmod(file.fileno(), mode)
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

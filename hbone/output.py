"""What a command prints as its answer."""

from __future__ import annotations

import os
from typing import TextIO

from shared.errors import UnavailableError


def write(stream: TextIO | None, text: str) -> None:
    """Writes `text` at once; None is a stream that was closed when we started. Raises UnavailableError if it
    cannot be written: whoever read it has gone, or a disk is full."""
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        # What is left in the stream's buffer goes nowhere: Python would fail once more when it ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        raise UnavailableError(f"cannot write the answer: {error.strerror}") from error

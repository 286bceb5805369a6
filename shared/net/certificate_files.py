"""Something made of certificate files, and made anew once the files have changed.

Owned here: noticing a change, and keeping what is in use when the new files are no good. What is made of them
is the caller's (`make`): pyOpenSSL's context at the built-in mTLS end, Python's at the HBONE port. Nobody
watches in between: the files are looked at when a connection comes, so an idle process does nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from shared.errors import ConfigError, UnavailableError

T = TypeVar("T")

LOOK_EVERY_S = 1.0
"""How often the files are looked at, a stat call each, when connections come; a renewed certificate is valid
long before the old one ends, so nobody waits for it."""


class CertificateFiles(Generic[T]):
    """What `make()` makes of `files`, as they are, or were when they last could be used.

    `log` hears of every change, `purpose` is the first word of what it hears.
    """

    _made: T

    def __init__(
        self,
        files: Iterable[Path],
        make: Callable[[], T],
        *,
        log: logging.Logger,
        purpose: str,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._files = tuple(files)
        self._make = make
        self._log = log
        self._purpose = purpose
        self._every_s = look_every_s
        self._stamp: tuple[object, ...] = ()
        self._next_look = 0.0

    def read(self) -> None:
        """Makes it of the files. Raises what `make` raises; then the old one stays."""
        # Looked at before it is read: what changes in between is found by the next look.
        self._stamp = tuple(map(_stamp, self._files))
        self._made = self._make()

    def current(self, now: float) -> T:
        """What there is for a connection that comes `now` (the loop's clock, seconds). `read` has to have
        succeeded once."""
        if now >= self._next_look:
            self._next_look = now + self._every_s
            if tuple(map(_stamp, self._files)) != self._stamp:
                try:
                    # Blocks for the small files of a memory-backed volume, about a millisecond.
                    self.read()
                    self._log.info("%s: certificate files read again", self._purpose)
                except (ConfigError, UnavailableError) as error:
                    self._log.warning("%s: keeping the certificate in use: %s", self._purpose, error)
        return self._made


def _stamp(file: Path) -> tuple[int, int, int]:
    """Changes whenever the file does: written over, replaced, or behind a symbolic link that moved on."""
    try:
        found = os.stat(file)
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)

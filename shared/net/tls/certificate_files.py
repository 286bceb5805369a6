"""Something made of certificate files, and made anew once the files have changed.

When the new files cannot be used, what was made of the old ones stays in use. The files are checked when a
connection comes, so an idle process does nothing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from shared import regular_files
from shared.errors import ConfigError, UnavailableError
from shared.watched_file import WatchedFiles

T = TypeVar("T")

LOOK_EVERY_S = 1.0
"""How often the files are checked, a stat call each, when connections come; a renewed certificate is valid
long before the old one ends, so nobody waits for it."""

READINGS = 3
"""In a row at most, when files that do not go together have changed while they were read."""

_known: weakref.WeakSet[CertificateFiles[Any]] = weakref.WeakSet()


class CertificateFiles(Generic[T]):
    """What `make()` makes of `files`, as they are, or were when they last could be used. The first of `files`
    is the certificate chain, the last one the roots.

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
        own: bool = True,
    ) -> None:
        """`own` False: they are not ours, only whom we trust, which is nothing to show."""
        self.purpose = purpose
        self.chain_pem = b""
        """The certificate chain in use; b"" before there is one."""
        self.roots_pem = b""
        """The roots in use."""
        self._files = tuple(files)
        self._make = make
        self._log = log
        self._every_s = look_every_s
        self._watched = WatchedFiles(self._files)
        self._complaint = ""  # about the files as they are now, once told
        self._next_look = 0.0
        self._own = own
        if own:
            _known.add(self)

    @property
    def chain_file(self) -> Path:
        """Where the certificate chain is."""
        return self._files[0]

    @property
    def roots_file(self) -> Path:
        """Where the roots are."""
        return self._files[-1]

    def read(self) -> None:
        """Makes it of the files. Raises what `make` raises; then the old one stays.

        Files that are replaced meanwhile, so that a new key is met beside an old certificate, are read again.
        """
        for left in reversed(range(READINGS)):
            self._watched.note()
            try:
                made = self._make()
            except (ConfigError, UnavailableError):
                if not left or not self._watched.changed():
                    raise
            else:
                self._made = made
                if self._own:
                    self.chain_pem, self.roots_pem = _content(self.chain_file), _content(self.roots_file)
                return

    def current(self, now: float) -> T:
        """What there is for a connection that comes `now` (the loop's clock, seconds). `read` has to have
        succeeded once."""
        if now >= self._next_look:
            self._next_look = now + self._every_s
            if self._watched.changed():
                self._renew()
        return self._made

    def _renew(self) -> None:
        try:
            # Blocks for the small files of a memory-backed volume, about a millisecond.
            self.read()
        except (ConfigError, UnavailableError) as error:
            if isinstance(error, UnavailableError):
                # Not what is in them is at fault but, say, a want of descriptors: that passes by itself.
                self._watched.forget()
            if str(error) != self._complaint:
                self._complaint = str(error)
                self._log.warning("%s: keeping the certificate in use: %s", self.purpose, error)
        else:
            self._complaint = ""
            self._log.info("%s: certificate files read again", self.purpose)


def in_use() -> list[CertificateFiles[Any]]:
    """All that have been read, and that somebody still holds, by purpose."""
    return sorted((files for files in _known if files.chain_pem), key=lambda files: files.purpose)


def _content(file: Path) -> bytes:
    """Of a file that has just been used: if it is gone by now there is nothing to show."""
    try:
        return regular_files.read(file, regular_files.MAX_PEM_BYTES)
    except OSError:
        return b""

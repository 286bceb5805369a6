"""Something made of certificate files, and made anew once the files have changed.

Owned here: noticing a change, and keeping what is in use when the new files are no good. What is made of them
is the caller's (`make`): pyOpenSSL's context at the built-in mTLS end, Python's at the HBONE port. Nobody
watches in between: the files are looked at when a connection comes, so an idle process does nothing.

All that are in use are known here (`in_use`), for those who show certificates and their ends.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from shared import regular_files
from shared.errors import ConfigError, UnavailableError

T = TypeVar("T")

LOOK_EVERY_S = 1.0
"""How often the files are looked at, a stat call each, when connections come; a renewed certificate is valid
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
        self._purpose = purpose
        self._every_s = look_every_s
        self._stamp: tuple[object, ...] = ()
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
            # Looked at before it is read: what changes in between is found by the next look.
            self._stamp = tuple(map(_stamp, self._files))
            try:
                made = self._make()
            except (ConfigError, UnavailableError):
                if not left or tuple(map(_stamp, self._files)) == self._stamp:
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
            if tuple(map(_stamp, self._files)) != self._stamp:
                self._renew()
        return self._made

    def _renew(self) -> None:
        try:
            # Blocks for the small files of a memory-backed volume, about a millisecond.
            self.read()
        except (ConfigError, UnavailableError) as error:
            if isinstance(error, UnavailableError):
                # Not what is in them is at fault but, say, a want of descriptors: that passes by itself.
                self._stamp = ()
            if str(error) != self._complaint:
                self._complaint = str(error)
                self._log.warning("%s: keeping the certificate in use: %s", self._purpose, error)
        else:
            self._complaint = ""
            self._log.info("%s: certificate files read again", self._purpose)


def stamps(files: Iterable[Path]) -> tuple[object, ...]:
    """Changes whenever one of `files` does; for who follows other files in this way."""
    return tuple(map(_stamp, files))


def in_use() -> list[CertificateFiles[Any]]:
    """All that have been read, and that somebody still holds, by purpose."""
    return sorted((files for files in _known if files.chain_pem), key=lambda files: files.purpose)


def _content(file: Path) -> bytes:
    """Of a file that has just been used: if it is gone by now there is nothing to show."""
    try:
        return regular_files.read(file, regular_files.MAX_PEM_BYTES)
    except OSError:
        return b""


def _stamp(file: Path) -> tuple[int, int, int]:
    """Changes whenever the file does: written over, replaced, or behind a symbolic link that moved on."""
    try:
        found = os.stat(file)
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)

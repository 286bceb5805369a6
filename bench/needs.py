"""What the bench needs from the machine, looked for before it begins.

With Python's own modules only, of any version that is still about: `make` asks before anything is installed.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
"""Where Debian has servers, too."""

TUNNEL_FILES = 12_000
"""Open files of a process that has 10,000 tunnels to one side."""


@dataclass(frozen=True)
class Need:
    """Something that a target of the Makefile needs."""

    what: str
    """In a word or two."""

    where_from: str
    """How to get it: a Debian package, or a sentence."""

    is_there: Callable[[], bool]

    left_out: str = ""
    """What is left out without it; empty: nothing can be done."""

    places: tuple[str, ...] = ()
    """The same, as the bench's places."""

    is_debian: bool = True
    """Whether `where_from` names a Debian package."""

    def message(self) -> str:
        """One line that says that it is missing."""
        how = f"Debian: apt-get install {self.where_from}" if self.is_debian else self.where_from
        if self.left_out:
            return f"without {self.what} {self.left_out} left out ({how})"
        return f"{self.what} is missing ({how})"


def program(name: str, package: str, left_out: str = "", places: tuple[str, ...] = ()) -> Need:
    """A program on PATH, or where Debian has servers."""
    return Need(name, package, lambda: shutil.which(name, path=PATH) is not None, left_out, places)


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc"))


def _has_headers() -> bool:
    compiler = _compiler()
    if compiler is None:
        return False
    asked = [compiler, "-E", "-include", "openssl/ssl.h", "-xc", "/dev/null"]
    return subprocess.run(asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


COMPILER = Need("a C compiler", "gcc libc6-dev", lambda: _compiler() is not None)
HEADERS = Need("OpenSSL's openssl/ssl.h", "libssl-dev", _has_headers)


def open_files(left_out: str, places: tuple[str, ...] = ()) -> Need:
    """A hard limit of open files that is enough for 10,000 tunnels."""
    return Need(
        f"a limit of {TUNNEL_FILES:,} open files",
        "ulimit -Hn tells yours; in Docker --ulimit nofile=65536",
        lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= TUNNEL_FILES,
        left_out,
        places,
        is_debian=False,
    )


def go() -> tuple[int, ...]:
    """Go's version; empty if there is none."""
    if shutil.which("go") is None:
        return ()
    said = subprocess.run(["go", "version"], stdout=subprocess.PIPE, text=True).stdout
    found = re.search(r"\bgo(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()


def cache() -> Path:
    """Where what was built for tests and the bench is kept, for all checkouts of this user: HBONE_TEST_CACHE,
    or hbone-tests in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HBONE_TEST_CACHE") or Path(home, "hbone-tests"))


GO = Need(
    "Go 1.25 or newer",
    "Debian 13: golang; or https://go.dev/dl",
    lambda: any(cache().glob("chisel/chisel-*")) or go() >= (1, 25),
    "chisel, beside hbone, is",
    is_debian=False,
)
"""For chisel."""

NEEDS = (
    COMPILER,
    HEADERS,
    program("haproxy", "haproxy", "the whole path (path, https) is", ("path", "https")),
    program("h2load", "nghttp2-client", "HTTPS requests (https) are", ("https",)),
    open_files("memory and its 10,000 tunnels are", ("memory",)),
)


def missing(needs: Iterable[Need] = NEEDS) -> tuple[Need, ...]:
    """Those of `needs` that are not there."""
    return tuple(need for need in needs if not need.is_there())

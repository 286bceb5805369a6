"""The OpenSSL that hgate and krun are measured with: their images', where the interpreter's is older.

Most of what hgate itself does for a GiB is AES-GCM, which OpenSSL 3.5 of Debian 13, where the images come
from, does twice as fast as Debian 12's 3.0. Debian 13's library wants Debian 13's C library, so apt fetches
the two, and checks their signatures with the keyring that is here. They are unpacked into the build folder,
nothing is installed; and the C library's loader starts the same interpreter with them. The load generator,
which is the same for all, and what is measured of installed commands (start-up) have what the machine has.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.tools import PROGRAM

FOLDER = PROGRAM.parent / "debian13"
"""What was fetched stays there until `make clean`."""

WANTED = (3, 5)
"""Of python:*-slim-trixie (deploy/hgate/Dockerfile)."""

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SOURCE = f"deb [signed-by={KEYRING}] http://deb.debian.org/debian trixie main\n"
PACKAGES = ("libssl3t64", "libc6")

FETCH_S = 120.0
"""For each of apt's two steps: 10 MB of package lists, 5 MB of packages."""

TRY_S = 10.0


@dataclass(frozen=True, slots=True)
class Interpreter:
    """How hgate and krun are started."""

    command: tuple[str, ...] = (sys.executable,)
    """What stands before Python's own arguments."""

    openssl: str = ssl.OPENSSL_VERSION
    """Its version, and whose it is; for the results."""


OWN = Interpreter()
"""As it is."""


def interpreter(folder: Path = FOLDER) -> Interpreter:
    """This interpreter, with OpenSSL no older than the images' if that can be had."""
    if ssl.OPENSSL_VERSION_INFO[:2] >= WANTED:
        return OWN
    found = _unpacked(folder)
    if found is None and _fetch(folder):
        found = _unpacked(folder)
    if found is None:
        return Interpreter(
            openssl=f"{ssl.OPENSSL_VERSION}, older than in the images: there bulk over TLS costs less"
        )
    return found


def _unpacked(folder: Path) -> Interpreter | None:
    """What is in `folder`, if Python runs with it."""
    for library in sorted(folder.glob("usr/lib/*/libcrypto.so.3")):
        for loader in sorted(library.parent.glob("ld-linux*.so.*")):
            told = ("--argv0", sys.executable, "--library-path", str(library.parent))
            command = (str(loader), *told, sys.executable)
            version = _output([*command, "-c", "import ssl; print(ssl.OPENSSL_VERSION)"], TRY_S)
            if version:
                own = " ".join(ssl.OPENSSL_VERSION.split()[:2])
                text = f"{version.strip()} as in the images (Debian 13's; the interpreter's own is {own})"
                return Interpreter(command, text)
    return None


def _fetch(folder: Path) -> bool:
    """Fetches the packages and unpacks them into `folder`; whether that worked."""
    apt, dpkg = shutil.which("apt-get"), shutil.which("dpkg-deb")
    if apt is None or dpkg is None or not KEYRING.exists():
        return False
    work = folder / "apt"
    for part in ("lists/partial", "archives/partial"):
        (work / part).mkdir(parents=True, exist_ok=True)
    (work / "status").touch()
    (work / "sources.list").write_text(SOURCE)
    options = {
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State": work,
        "Dir::State::status": work / "status",
        "Dir::Cache": work,
        "Acquire::Languages": "none",
        "Acquire::http::Timeout": 20,
        "APT::Sandbox::User": "",
    }
    told = [apt, "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    try:
        if _output([*told, "update"], FETCH_S) is None:
            return False
        if _output([*told, "download", *PACKAGES], FETCH_S, cwd=work) is None:
            return False
        unpacked = [
            _output([dpkg, "-x", str(package), str(folder)], FETCH_S) for package in work.glob("*.deb")
        ]
        return None not in unpacked
    finally:
        shutil.rmtree(work)


def _output(command: Sequence[str], timeout_s: float, *, cwd: Path | None = None) -> str | None:
    """What a command says; None if it fails or takes longer than `timeout_s` seconds."""
    try:
        done = subprocess.run(
            command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout

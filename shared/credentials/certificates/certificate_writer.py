"""Replaces certificate, key and roots in a folder all at once, as kubelet replaces a mounted secret's files.

    certificates.pem      -> ..data/certificates.pem        and so on: links that never change
    ..data                -> ..1732104000000000000          the link that is replaced, by rename
    ..1732104000000000000/   certificates.pem, private_key.pem, ca_certificates.pem

Three files cannot be renamed at once, but a link can: a reader sees the old three or the new three, unless
it opens one file before the rename and the next one after it. Such a reader finds that key and certificate
do not match, and reads again: ours do, and so does Envoy (its `watched_directory` sees the rename, and it
reads until two readings agree). The version before stays until the next rename, for readers that have
followed the link already.

A folder has one writer at a time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from shared.atomic_files import PRIVATE_MODE, PUBLIC_MODE, write_atomically
from shared.net.tls.certificate_folder import (
    BUNDLES_FILE,
    CERTIFICATES_FILE,
    PRIVATE_KEY_FILE,
    ROOTS_FILE,
)

DATA = "..data"
_VERSION_PREFIX = ".."
_TURNING = "..data_tmp"
FOLDER_MODE = 0o755


@dataclass(frozen=True, slots=True)
class Contents:
    """The three files; the key is kept out of `repr`."""

    chain_pem: bytes
    key_pem: bytes = field(repr=False)
    roots_pem: bytes
    bundles_json: bytes = b""
    """Which of the roots are whose; b"": nobody has told, and there is no such file."""


def write(folder: Path, contents: Contents, owner: tuple[int, int] | None = None) -> None:
    """Replaces the files in `folder`, which is made if it is missing; the key has mode 0600, the others 0644.
    `owner` is a user and a group id for the files, None: ours. Files or links of other makers under the three
    names are replaced as well.

    Raises OSError when the folder cannot be made or written; then what was there is there still.
    """
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    before = current_version(folder)
    version = _new_version(folder)
    try:
        if contents.bundles_json:
            write_atomically(version / BUNDLES_FILE, contents.bundles_json, PUBLIC_MODE, owner)
        write_atomically(version / ROOTS_FILE, contents.roots_pem, PUBLIC_MODE, owner)
        write_atomically(version / PRIVATE_KEY_FILE, contents.key_pem, PRIVATE_MODE, owner)
        write_atomically(version / CERTIFICATES_FILE, contents.chain_pem, PUBLIC_MODE, owner)
        _link(folder, DATA, version.name)
    except BaseException:
        shutil.rmtree(version, ignore_errors=True)
        raise
    bundles = (BUNDLES_FILE,) if contents.bundles_json else ()
    for name in (*bundles, ROOTS_FILE, PRIVATE_KEY_FILE, CERTIFICATES_FILE):
        # The first time only, so links turn one by one only where something else was before.
        if not _leads_to(folder / name, f"{DATA}/{name}"):
            _link(folder, name, f"{DATA}/{name}")
    # A link of ours that leads nowhere now; what others have put there is theirs.
    if not bundles and _leads_to(folder / BUNDLES_FILE, f"{DATA}/{BUNDLES_FILE}"):
        (folder / BUNDLES_FILE).unlink()
    _forget_others(folder, {version.name, before})


def current_version(folder: Path) -> str:
    """The name of the sub-folder that is in use, "" if the folder has none of ours."""
    try:
        return os.readlink(folder / DATA)
    except OSError:
        return ""


def _new_version(folder: Path) -> Path:
    # By the clock, so that a listing is in order; one that runs backwards finds the name taken at worst.
    number = time.time_ns()
    while True:
        version = folder / f"{_VERSION_PREFIX}{number}"
        try:
            version.mkdir()
        except FileExistsError:
            number += 1
        else:
            version.chmod(FOLDER_MODE)  # whatever our umask is: others than us read the certificate
            return version


def _link(folder: Path, name: str, target: str) -> None:
    turning = folder / _TURNING
    with contextlib.suppress(FileNotFoundError):
        turning.unlink()
    turning.symlink_to(target)
    turning.rename(folder / name)


def _leads_to(link: Path, target: str) -> bool:
    try:
        return os.readlink(link) == target
    except OSError:
        return False


def _forget_others(folder: Path, kept: set[str]) -> None:
    """Removes versions that nobody can be reading any more. What cannot be removed is left: it costs 5 KB."""
    for entry in folder.iterdir():
        is_version = entry.name.startswith(_VERSION_PREFIX) and entry.name[2:].isdigit()
        if is_version and entry.name not in kept:
            shutil.rmtree(entry, ignore_errors=True)

"""Replaces certificate, key and roots in a folder all at once (`shared.atomic_folders`).

A reader that opens one file before the turn and the next one after it finds that key and certificate do not
match, and reads again: ours do, and so does Envoy (its `watched_directory` sees the rename, and it reads
until two readings agree).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shared import atomic_folders
from shared.atomic_files import PRIVATE_MODE
from shared.atomic_folders import Content
from shared.net.tls.certificate_folder import (
    BUNDLES_FILE,
    CERTIFICATES_FILE,
    PRIVATE_KEY_FILE,
    ROOTS_FILE,
)


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
    bundles = {BUNDLES_FILE: Content(contents.bundles_json)} if contents.bundles_json else {}
    files = {
        **bundles,
        ROOTS_FILE: Content(contents.roots_pem),
        PRIVATE_KEY_FILE: Content(contents.key_pem, PRIVATE_MODE),
        CERTIFICATES_FILE: Content(contents.chain_pem),
    }
    atomic_folders.write(folder, files, owner)

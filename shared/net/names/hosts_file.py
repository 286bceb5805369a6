"""What the hosts file says of a name (hosts(5)); and `localhost`, which is loopback whatever it says."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from shared.watched_file import WatchedFiles

HOSTS = Path("/etc/hosts")

MAX_FILE_BYTES = 4 << 20
"""What is behind it is not read: a long list of blocked names has so much."""

LOOPBACK = ("::1", "127.0.0.1")


class HostsFile:
    """Read when it is first asked, and again when it has changed."""

    def __init__(self, file: Path = HOSTS) -> None:
        self._file = file
        self._watched = WatchedFiles([file])
        self._names: dict[str, tuple[str, ...]] = {}

    def addresses(self, name: str) -> tuple[str, ...]:
        """Of `name`, in lower case and without a dot at its end; none if it is not there.

        `localhost`, and what ends in `.localhost`, is never looked up elsewhere (RFC 6761 section 6.3).
        """
        if self._watched.changed():
            self._watched.note()
            self._names = _read(self._file)
        found = self._names.get(name, ())
        if not found and (name == "localhost" or name.endswith(".localhost")):
            return LOOPBACK
        return found


def _read(file: Path) -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {}
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_FILE_BYTES).decode("latin-1")
    except OSError:
        return names
    for line in text.splitlines():
        address, *found = line.partition("#")[0].split() or ("",)
        if found and _is_address(address):
            for name in found:
                name = name.lower().removesuffix(".")
                names[name] = (*names.get(name, ()), address)
    return names


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True

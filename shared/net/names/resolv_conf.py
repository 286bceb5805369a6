"""What resolv.conf says of names that are not absolute: the search list and `ndots` (resolv.conf(5)).

c-ares reads the name servers and their ports from it itself.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from shared.address import MAX_NAME_CHARS

RESOLV_CONF = Path("/etc/resolv.conf")

MAX_FILE_BYTES = 64 * 1024
"""What is behind it is not read; a search list has a few hundred bytes."""

MAX_NDOTS = 15
"""The C library's bound."""

MAX_DOMAINS = 32
"""Of the search list: Kubernetes allows as many, the C library more."""

_NDOTS = re.compile(r"ndots:([0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class SearchList:
    """How a name without a dot at its end is made absolute."""

    domains: tuple[str, ...] = ()
    """Without dots at their ends."""

    ndots: int = 1
    """A name with at least so many dots is asked as it is first, then with the domains; any other the other
    way round."""

    def candidates(self, name: str) -> list[str]:
        """The absolute names to ask for, in order, for a name that is not absolute itself."""
        searched = [f"{name}.{domain}." for domain in self.domains]
        # A longer one cannot exist.
        searched = [candidate for candidate in searched if len(candidate) <= MAX_NAME_CHARS + 1]
        as_it_is = f"{name}."
        return [as_it_is, *searched] if name.count(".") >= self.ndots else [*searched, as_it_is]


def search_list(file: Path = RESOLV_CONF) -> SearchList:
    """Reads the file; what is missing, or no file, means what resolv.conf(5) says."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_FILE_BYTES).decode("latin-1")
    except OSError:
        text = ""
    domains: list[str] | None = None
    ndots = 1
    for line in text.splitlines():
        keyword, *words = line.split()[: MAX_DOMAINS + 1] or ("",)
        if keyword == "search" or (keyword == "domain" and words):
            domains = words if keyword == "search" else words[:1]  # the last of both counts
        elif keyword == "options":
            for word in words:
                if match := _NDOTS.fullmatch(word):
                    ndots = min(int(match[1]), MAX_NDOTS)
    if domains is None:
        domains = [socket.gethostname().partition(".")[2]]
    return SearchList(tuple(filter(None, (domain.strip(".").lower() for domain in domains))), ndots)

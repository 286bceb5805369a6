"""Ports of the container's loopback, from one number to another."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.address import MAX_PORT

LOOPBACK = "127.0.0.1"

MAX_RANGES = 100
"""In one variable."""

_RANGE = re.compile(r"([1-9][0-9]{0,4})(?:-([1-9][0-9]{0,4}))?")


@dataclass(frozen=True, slots=True)
class PortRange:
    """Both ends are in it."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def __contains__(self, port: int) -> bool:
        return self.first <= port <= self.last

    @classmethod
    def parse(cls, text: str) -> PortRange:
        """Reads `PORT` or `PORT-PORT`. Raises ValueError."""
        match = _RANGE.fullmatch(text)
        if match is None:
            raise ValueError("must be ports or ranges such as 8000-8010")
        first = int(match[1])
        last = int(match[2] or first)
        if not first <= last <= MAX_PORT:
            raise ValueError(f"a range goes up, to {MAX_PORT} at most")
        return cls(first, last)

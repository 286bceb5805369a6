"""A service that was found by its name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shared.cluster.service_annotations import origin_of


@dataclass(frozen=True, slots=True)
class FoundService:
    """Where it is, and who said so."""

    url: str
    """https://HOST, or https://HOST:PORT."""

    place: str
    """Who said so, for people."""

    audience: str = ""
    """Another than the URL's, of the tokens that it accepts; empty: there is none."""

    def kept(self) -> dict[str, str]:
        """For a file of `hbone.kept`."""
        return asdict(self)

    @classmethod
    def of_kept(cls, kept: Any) -> FoundService | None:
        """What was kept; None if it is nothing of the kind."""
        try:
            found = cls(**kept)
            origin_of(found.url)
        except (TypeError, ValueError):
            return None
        return found if isinstance(found.place, str) and isinstance(found.audience, str) else None

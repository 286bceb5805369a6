"""The contract between the token cache and the sources of tokens: a minter gets a new ID token; the cache
decides when to ask it, and what follows when it fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Minted:
    """A new token, which is kept out of `repr`, and its end in seconds since 1970."""

    token: str = field(repr=False)
    expires_at_s: float


class Minter(Protocol):
    """Where new tokens come from."""

    @property
    def identity(self) -> str:
        """Who the tokens are for, in a few words for log lines and as a part of the cache's key: the account,
        or the place that decides about it."""
        ...

    async def mint(self, audience: str) -> Minted:
        """A new token for `audience`, asked for now; takes no longer than the minter's own timeouts.

        Raises TokenError, whose text names the place that was asked and has nothing of any secret.
        """
        ...

"""What happened to the tokens of one identity and audience, and what may be told of one; in plain numbers.

Several tokens may share one object, so nothing here is ever set, only added to. No token is kept here.
"""

from __future__ import annotations

from dataclasses import dataclass


class TokenCounts:
    """New tokens since the start, and what went wrong."""

    __slots__ = ("failures_by_reason", "refreshes_failed_total", "refreshes_total")

    def __init__(self) -> None:
        self.refreshes_total = 0
        """Times that there was a new token."""
        self.refreshes_failed_total = 0
        """Times that there should have been one."""
        self.failures_by_reason: dict[str, int] = {}
        """By `shared.errors.TOKEN_REASONS`; a token that the far side rejected is among them, too."""

    def refreshed(self) -> None:
        """There is a new token."""
        self.refreshes_total += 1

    def failed(self, reason: str) -> None:
        """There is none, or it was rejected; `reason` is one of `shared.errors.TOKEN_REASONS`."""
        self.failures_by_reason[reason] = self.failures_by_reason.get(reason, 0) + 1
        if reason != "rejected":
            self.refreshes_failed_total += 1


@dataclass(frozen=True, slots=True)
class TokenStatus:
    """A token as it may be shown. Times are in seconds since 1970; None: there is no token, or it says
    nothing of it."""

    identity: str
    """Whose it is, or the place that decides about it."""
    audience: str
    """Whom it is for; empty if that is not known."""
    minted_at_s: float | None
    expires_at_s: float | None
    failure: str
    """Why the last attempt to get one failed; empty if it did not."""
    failed_at_s: float | None
    accepted: bool = True
    """Whether the far side has ever accepted one, as far as that is remembered; of a file it is not asked."""

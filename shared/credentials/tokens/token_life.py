"""The life of one kept token: until when it is sent, when a new one is asked for, how long a failure counts.

Pure decisions: time is a parameter, in seconds since 1970 as `exp` is, for a token ends by the wall clock. So
a machine that slept, and a clock that was set, are noticed when the token is used, whatever a timer says.

With a token, by its `exp`:

- until 5 to 10 minutes before, by chance (of a short life the last quarter to half): it is sent;
- until 60 s before (of a short life the last fifth): it is sent, while a new one is asked for in the
  background. A failure there harms nobody; the next attempt follows after a pause that doubles up to a
  minute;
- after that: it is not sent any more, and callers wait.

Without one a failure answers all callers, for a second at first, five at most. A token that the far side has
rejected is dropped, but not its successor within ten seconds: then it is not the token's fault.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.backoff import doubled_s, half_or_more
from shared.credentials.tokens.minting import Minted
from shared.errors import TokenError

REFRESH_AHEAD_S = 300.0
"""To twice that: 5 to 10 minutes, so that many gateways that started together do not ask together."""

REFRESH_SHARE = 0.25
"""To twice that of the life, where it is short: Google's tokens live an hour, those of others 10 minutes."""

UNUSABLE_AHEAD_S = 60.0
"""A token this close to its end is not sent any more: clocks differ, and a request takes its time."""

UNUSABLE_SHARE = 0.2
"""The same as a share of a short life; less than REFRESH_SHARE, so that there is always time to refresh."""

LEAST_PACE_S = 1.0
"""Between two tokens that are fetched ahead: a server with a cache of its own may give us the same again,
ever closer to its end."""

FAILURE_FIRST_S = 1.0
"""How long the first failure answers for a new attempt, so that a thousand waiting tunnels do not become a
thousand requests in a row."""

FAILURE_MOST_S = 5.0
"""A mesh client has 10 s for its handshake: it should see one fresh attempt at least."""

BEHIND_MOST_S = 60.0
"""Longest pause between attempts that nobody waits for."""

REJECTED_PACE_S = 10.0
"""Least time between two tokens dropped as rejected. A service that rejects all of them would otherwise have
one minted for each of its tunnels."""


class TokenLife:
    """One token's, and its successors'."""

    __slots__ = (
        "_chance",
        "_failures",
        "_rejected_at_s",
        "_remembered_s",
        "expires_at_s",
        "failed_at_s",
        "failure",
        "minted_at_s",
        "refresh_at_s",
        "token",
        "usable_until_s",
    )

    def __init__(self, chance: Callable[[], float]) -> None:
        """`chance` gives a number in 0..1."""
        self.token = ""
        """Empty: there is none."""
        self.minted_at_s = 0.0
        self.expires_at_s = 0.0
        self.usable_until_s = 0.0
        self.refresh_at_s = 0.0
        """From here on a new one is to be asked for; with a token never after `usable_until_s`."""
        self.failure: TokenError | None = None
        """Why there was no new token, None after a success."""
        self.failed_at_s = 0.0
        self._chance = chance
        self._failures = 0
        self._remembered_s = 0.0
        self._rejected_at_s = float("-inf")

    @property
    def length_s(self) -> float:
        """How long the last token was to live."""
        return self.expires_at_s - self.minted_at_s

    def usable(self, now: float) -> bool:
        """Whether there is a token that can be sent `now`."""
        return bool(self.token) and now < self.usable_until_s

    def remembered(self, now: float) -> TokenError | None:
        """The failure that answers for a new attempt `now`. A clock that was set back forgets it: it must not
        last until the same time has come again."""
        return self.failure if 0 <= now - self.failed_at_s < self._remembered_s else None

    def asking(self, now: float) -> None:
        """A new one is being asked for; until the answer there is no other attempt."""
        self.refresh_at_s = self._bounded(now + BEHIND_MOST_S, now)

    def minted(self, minted: Minted, now: float) -> None:
        """There is a new one, which ends after `now`."""
        self.token = minted.token
        self.minted_at_s = now
        self.expires_at_s = minted.expires_at_s
        left_s = minted.expires_at_s - now
        chance = 1.0 + self._chance()
        ahead_s = min(REFRESH_AHEAD_S * chance, left_s * REFRESH_SHARE * chance)
        self.usable_until_s = minted.expires_at_s - min(UNUSABLE_AHEAD_S, left_s * UNUSABLE_SHARE)
        self.refresh_at_s = self._bounded(max(minted.expires_at_s - ahead_s, now + LEAST_PACE_S), now)
        self.failure = None
        self._failures = 0

    def failed(self, error: TokenError, now: float) -> None:
        """There is no new one."""
        chance, failures = self._chance(), self._failures
        pause_s = half_or_more(doubled_s(FAILURE_FIRST_S, BEHIND_MOST_S, failures), chance)
        self._failures += 1
        self.failure = error
        self.failed_at_s = now
        self._remembered_s = half_or_more(doubled_s(FAILURE_FIRST_S, FAILURE_MOST_S, failures), chance)
        if not self.usable(now):
            self.token = ""
        self.refresh_at_s = self._bounded(now + pause_s, now)

    def rejected(self, token: str | None, now: float) -> bool:
        """Drops the token, if it is `token` or that is None; False if it stays."""
        if not self.token or (token is not None and token != self.token):
            return False
        if token is not None and 0 <= now - self._rejected_at_s < REJECTED_PACE_S:
            return False
        self._rejected_at_s = now
        self.token = ""
        self.refresh_at_s = now
        return True

    def _bounded(self, at_s: float, now: float) -> float:
        return min(at_s, self.usable_until_s) if self.usable(now) else at_s

"""Whether a tunnel request that came to nothing is sent once more, and after how long.

The decisions, as plain arithmetic: no socket and no clock.

A tunnel request is no idempotent method: RFC 9110 section 9.2.2 allows to send it again only if nothing is
lost by it. Nothing is: until the 200 the far side has had nothing but headers and a first flight, which may
arrive more than once (`opening`). The client's bytes are still with us; all that an attempt may leave behind
is a connection to the target on which a handshake has begun. The rules:

| what came instead of a 200 | again? | why |
|---|---|---|
| REFUSED_STREAM, or a GOAWAY that leaves the stream out | at once, twice; then after a pause | 1 |
| the connection was lost, on which there had been answers | at once, until one that is new was tried | 2 |
| the connection was lost, on which there had been none | no | 3 |
| 401, and there is another token now | at once, one time | 4 |
| 429, 502, 503 | after a pause | 5 |
| what a service causes that starts | after a pause, if its route waits for that | 6 |
| any other status, RST_STREAM with another code | no: that is the answer | |

1. It was not processed, and may be sent again (RFC 9113 sections 6.8 and 8.7).
2. An idle connection may be closed at any time, also just when a request is on its way to it (RFC 9112
   section 9.3.1 says so of HTTP/1.1, RFC 9113 section 9.1 of HTTP/2); whoever ends an instance ends it so.
3. A service that breaks off whenever it is asked would be asked for ever.
4. RFC 9110 section 15.5.2: with other credentials. A token can be revoked before its time.
5. RFC 6585 section 4, RFC 9110 sections 15.6.3 and 15.6.4. Cloud Run answers so while no instance is free,
   and when one starts or ends; krun, while its target does not listen. Not 500, a fault, and not 504: there
   the request has had its time.
6. A route that knows that its service scales to zero (`cold_start`) waits for it: also after a 504, a dial
   that failed, a connection that was lost before it had an answer, and a request that nobody answered. For
   one tunnel the time is the bound; how many may wait for one origin, `RetryRules.max_starting` says.

The pause is what Retry-After asks for (RFC 9110 section 10.2.3), and on top of it a random part of 0.25 s,
then of 0.5 s, 1 s and so on up to `MAX_BACKOFF_S`: many that were refused together must not come back
together.

What comes after a pause is bounded twice: by `RetryRules.max_retries` for each tunnel, and for each origin by
a budget, so that retries cannot multiply the load on a service that is already in trouble. What comes at once
needs no budget: a refused stream cost the far side nothing, a lost connection is lost only once, and of the
tunnels whose token was rejected each comes back once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.backoff import doubled_s
from shared.http2 import frames

REFUSED = "refused"
CONNECTION_LOST = "connection_lost"
TOKEN = "token"
CONNECT = "connect"
NO_ANSWER = "no_answer"

PATIENCE_STATUSES = {429: "429", 502: "502", 503: "503"}
"""Statuses that pass, and their names as reasons."""

STARTING_STATUSES = {**PATIENCE_STATUSES, 504: "504"}
"""Those that a service causes that is about to start."""

REASONS = (REFUSED, CONNECTION_LOST, TOKEN, CONNECT, NO_ANSWER, *STARTING_STATUSES.values())
"""Why something is sent again: all values of the metric's label `reason`."""

BACKOFF_S = 0.25
"""Longest first pause without Retry-After: as long as a service takes to start another thread, not another
instance; those who wait for an instance get there by doubling."""

MAX_BACKOFF_S = 8.0
"""No random pause is longer, so that somebody who has waited long does not miss the instance that came."""

STARTING_BACKOFF_S = 2.0
"""The same while a service starts, which takes seconds: whoever asks less often is served later than need
be."""

MAX_RETRY_AFTER_S = 3600.0
"""A longer Retry-After counts as this: no deadline is later."""

REFUSED_AT_ONCE = 2
"""Streams refused before there is a pause: one by the GOAWAY of a connection, one by that of its neighbour,
which the same restart ends."""

LOST_AT_ONCE = 64
"""Dead connections that one request may find. Each is gone from the pool then, which has no more than so many
to an origin; the next one is new, and if that is lost, too, that is the answer."""

MIN_BUDGET = 10
"""Retries at once to an origin that are never too many: with few requests a share of them would be none."""

_DATE_FORMATS = (
    "%a, %d %b %Y %H:%M:%S GMT",
    "%A, %d-%b-%y %H:%M:%S GMT",
    "%a %b %d %H:%M:%S %Y",
)
"""The forms of an HTTP-date (RFC 9110 section 5.6.7), the two obsolete ones included."""


@dataclass(frozen=True, slots=True)
class RetryRules:
    """What can be set."""

    max_retries: int = 5
    """Times that one request is sent again, whatever came; 0: never. The default's pauses are 0.25, 0.5, 1, 2
    and 4 s at most: an instance that starts within seconds is reached, one that does not is asked six times.
    Attempts on connections that turned out to be dead are not counted, unless it is 0."""

    budget_percent: int = 20
    """Of the requests to an origin that wait for their answer so many in a hundred may be retries after a
    pause, or `MIN_BUDGET` if that is more. Envoy's default share."""

    max_lost: int = LOST_AT_ONCE
    """Dead connections that one request may find."""

    pauses: bool = True
    """Whether it is sent again after a pause, too."""

    max_starting: int = 500
    """Requests that may wait for one origin to start. Each holds its client's place."""

    unanswered_s: float = 30.0
    """While a service starts, its front end may hold a request until there is an instance. A request that was
    held for longer may be lost with whatever held it, and is sent once more."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Send it again."""

    reason: str
    """One of REASONS."""

    wait_s: float = 0.0
    """After so many seconds; if not at once, it needs a place in the budget."""

    is_for_start: bool = False
    """The service may be starting: the place that it needs is one of those who wait for that."""


class Retries:
    """The retries of one request. Each method is called with the outcome of an attempt, and returns a Retry,
    or None if the outcome is final. `pick` gives random numbers from 0 to 1."""

    __slots__ = ("_lost", "_most", "_pauses", "_pick", "_refused", "_rules", "_starts", "_taken", "_tokens")

    def __init__(self, rules: RetryRules, pick: Callable[[], float] | None = None) -> None:
        self._rules = rules
        self._most = rules.max_retries
        self._pick = pick or _random
        self._taken = 0
        self._pauses = 0
        self._starts = 0
        self._refused = 0
        self._lost = 0
        self._tokens = 0

    def after_reset(self, code: int, *, connection_lost: bool, answered_before: bool) -> Retry | None:
        """The stream broke with `code` (RFC 9113 section 7), together with its connection if
        `connection_lost`. `answered_before`: an answer has come on that connection before, to whomever."""
        if code == frames.REFUSED_STREAM:
            self._refused += 1
            return self._at_once(REFUSED) if self._refused <= REFUSED_AT_ONCE else self._paused(REFUSED)
        # A connection that ends by the peer's fault of protocol has that fault's code.
        if connection_lost and answered_before and code == frames.CANCEL and self._most:
            self._lost += 1
            return Retry(CONNECTION_LOST) if self._lost <= self._rules.max_lost else None
        return None

    def after_rejected_token(self) -> Retry | None:
        """401 came, and there is another token now."""
        self._tokens += 1
        return self._at_once(TOKEN) if self._tokens == 1 else None

    def after_status(self, status: int, retry_after_s: float | None) -> Retry | None:
        """Another status came; `retry_after_s` is what its Retry-After asks for, if anything."""
        reason = PATIENCE_STATUSES.get(status)
        return self._paused(reason, retry_after_s or 0.0) if reason is not None else None

    def while_starting(self, reason: str, retry_after_s: float | None = None) -> Retry:
        """The service may be starting, and its route waits for that; `retry_after_s` as in `after_status`."""
        longest_s = doubled_s(BACKOFF_S, STARTING_BACKOFF_S, self._starts)
        self._starts += 1
        return Retry(reason, (retry_after_s or 0.0) + longest_s * (1.0 - self._pick()), is_for_start=True)

    def _at_once(self, reason: str) -> Retry | None:
        if self._taken >= self._most:
            return None
        self._taken += 1
        return Retry(reason)

    def _paused(self, reason: str, least_s: float = 0.0) -> Retry | None:
        if self._taken >= self._most or not self._rules.pauses:
            return None
        self._taken += 1
        longest_s = doubled_s(BACKOFF_S, MAX_BACKOFF_S, self._pauses)
        self._pauses += 1
        # 1 - x: a random number may be 0 and is never 1, and no pause at all would be no pause.
        return Retry(reason, least_s + longest_s * (1.0 - self._pick()))


class RetryBudget:
    """The requests to one origin that wait for their answer, and those among them that are retries, or wait
    for it to start."""

    __slots__ = ("__weakref__", "requests", "retries", "starting")

    def __init__(self) -> None:
        self.requests = 0
        self.retries = 0
        self.starting = 0

    def has_room(self, percent: int) -> bool:
        """Whether one more of them may become a retry; `percent` is `RetryRules.budget_percent`."""
        return self.retries < max(MIN_BUDGET, self.requests * percent // 100)


def _random() -> float:
    import random  # most starts need no pause

    return random.random()


def retry_after_s(value: bytes, now: float) -> float | None:
    """The seconds that a Retry-After header asks for, at most `MAX_RETRY_AFTER_S`; `now` is the wall clock in
    seconds since 1970. None if it is empty or malformed; a date that has passed is 0."""
    text = value.decode("latin-1").strip()
    if text.isascii() and text.isdigit():
        return min(float(text), MAX_RETRY_AFTER_S)
    from datetime import UTC, datetime  # a start without it is 0.7 ms shorter

    for form in _DATE_FORMATS:
        try:
            date = datetime.strptime(text, form).replace(tzinfo=UTC)
        except ValueError:
            continue
        return min(max(date.timestamp() - now, 0.0), MAX_RETRY_AFTER_S)
    return None

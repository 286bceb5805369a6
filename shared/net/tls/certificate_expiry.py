"""The end of a peer's certificate while its connection is open.

TLS checks a certificate's times in the handshake only, and an HTTP/2 connection may be open for weeks after
it: without more, a peer that has had a certificate once could open tunnels for as long as it likes.

The rules:

1. At the end the peer is told to open no more streams (`ended`). Open ones then have the drain timeout to
   finish, and are broken off after it (`over`).
2. A timer notices the end, and each new stream is checked against the clock, too (`allows_stream`): the
   loop's timers stand still while the machine sleeps, and the wall clock may be set.
3. Streams that were on their way when the peer was told are served, for `GRACE_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from shared.errors import DeniedError, ExpiredError

LOOK_S = 60.0
"""Between two checks of the wall clock, at most: a machine that slept, or whose clock was set, is late by
it."""

LEAST_S = 0.001
"""Before the next check, for a wall clock that stands still."""

GRACE_S = 2.0
"""After the end, in which a peer may still open streams: a second until it has seen GOAWAY, a second because
clocks differ."""


def end_of(chain: Sequence[bytes]) -> float:
    """When the first certificate of a verified `chain` in DER ends, in seconds since the epoch: from then on
    no handshake would succeed with it. Raises DeniedError if one cannot be read."""
    from cryptography import x509

    try:
        ends = [x509.load_der_x509_certificate(der).not_valid_after_utc for der in chain]
    except (ValueError, x509.InvalidVersion) as error:
        raise DeniedError(f"peer certificate denied: its chain cannot be read: {error}") from error
    return min(end.timestamp() for end in ends)


def next_check_s(left_s: float) -> float:
    """In how many seconds to check the wall clock again, by which `left_s` are left until the end."""
    return min(max(left_s, LEAST_S), LOOK_S)


class CertificateExpiry:
    """Watches one connection from its handshake on. `ended(error)` and `over(error)` are called once
    each, as the module says. To be started when the owner is ready for that, and closed when the connection
    is gone."""

    __slots__ = (
        "_drain_timeout_s",
        "_ended",
        "_ends",
        "_grace_s",
        "_loop",
        "_over",
        "_timer",
        "_wall_clock",
        "_whose",
        "error",
    )

    def __init__(
        self,
        ends: float,
        whose: str,
        *,
        ended: Callable[[ExpiredError], None],
        over: Callable[[ExpiredError], None],
        drain_timeout_s: Callable[[], float],
        grace_s: float = GRACE_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`ends` and `wall_clock` are in seconds since the epoch; `whose` is the peer's name. `grace_s` is 0
        where the streams are ours to open."""
        self.error: ExpiredError | None = None
        """Set once the certificate has ended."""
        self._ends = ends
        self._whose = whose
        self._ended = ended
        self._over = over
        self._drain_timeout_s = drain_timeout_s
        self._grace_s = grace_s
        self._wall_clock = wall_clock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """From now on checks; `ended` may be called within."""
        self._check()

    def allows_stream(self) -> bool:
        """Whether a new stream may be opened now. `ended` has been called once none may."""
        now = self._wall_clock()
        if now >= self._ends and self.error is None:
            self._end()
        return now < self._ends + self._grace_s

    def close(self) -> None:
        """Checks no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        left_s = self._ends - self._wall_clock()
        if left_s > 0:
            self._timer = self._loop.call_later(next_check_s(left_s), self._check)
        else:
            self._end()

    def _end(self) -> None:
        self.close()
        error = self.error = ExpiredError(f"peer certificate denied: that of {self._whose} has expired")
        self._timer = self._loop.call_later(self._drain_timeout_s(), self._over, error)
        self._ended(error)

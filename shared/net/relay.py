"""Two legs joined: what one receives the other sends, until both directions have ended or one leg breaks.

The rules, for each of the two directions on its own:

1. Bytes go on in the order they came, before the end or failure that came after them.
2. `ended` of one leg becomes `write_eof` of the other: TCP FIN, END_STREAM and close_notify stand for each
   other, and the other direction goes on.
3. Once both directions have ended, both legs are closed and the tunnel is complete.
4. A leg that breaks before its `ended` has lost bytes, so the other is aborted: its peer must not take what
   it got for the whole.
5. A leg that breaks after its `ended` has delivered everything and wants nothing more: that is complete too.
   If it is the upstream (a server that answers in full and then resets with NO_ERROR, RFC 9113 section 8.1;
   an app that closes), what downstream still sends is dropped, so that closing it does not destroy what its
   peer has yet to read (RFC 9112 section 9.6); it is let go when its peer ends, or after `LINGER_S`.
   If it is the downstream, nobody is left to read, and the upstream is closed after what was written to it.
6. A tunnel at rest can be expired: the downstream gets its end first, as though the upstream had ended, for
   it is the client that opens another connection without an error when a silent one ends. What it says to
   that (close_notify, its own end) still goes upstream, so the mTLS end sees an orderly end as well. If the
   upstream has something to say after all, both are aborted: the client's end was no true one then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.errors import HboneError
from shared.net.legs import Buffer, Leg

LINGER_S = 5.0
"""How long a downstream whose upstream is gone may take to its own end before it is closed."""


class Relay:
    """Joins `downstream` and `upstream`; calls `finished(self)` once, when the tunnel is over.

    `sent_bytes` went from downstream to upstream, `received_bytes` the other way. `error` is None after an
    orderly end; else `broken` is the leg that broke.
    """

    __slots__ = (
        "_ended",
        "_expired",
        "_finished",
        "_linger",
        "broken",
        "downstream",
        "error",
        "over",
        "received_bytes",
        "sent_bytes",
        "upstream",
    )

    def __init__(self, downstream: Leg, upstream: Leg, finished: Callable[[Relay], None]) -> None:
        self.downstream = downstream
        self.upstream = upstream
        self.sent_bytes = 0
        self.received_bytes = 0
        self.error: HboneError | None = None
        self.broken: Leg | None = None
        self.over = False
        self._ended: Leg | None = None  # the leg that ended first
        self._linger: asyncio.TimerHandle | None = None
        self._expired = False  # rule 6; then `_linger` is set, too
        self._finished = finished

    @property
    def buffered_bytes(self) -> int:
        """What this process holds for both peers."""
        return self.downstream.buffered_bytes + self.upstream.buffered_bytes

    @property
    def broken_downstream(self) -> bool:
        """It was the client's side that broke."""
        return self.broken is self.downstream

    def start(self) -> None:
        """Joins both legs; what they received so far goes on first.

        The downstream is the first: a TLS leg takes no data before it is joined, while an upstream has been
        dialled or answered by now and takes it at any time.
        """
        self.downstream.join(self)
        if not self.over:
            self.upstream.join(self)

    def abort(self, error: HboneError) -> None:
        """Ends the tunnel at once, telling both peers that it was no orderly end."""
        if not self.over:
            self.error = error
            self.downstream.abort()
            self.upstream.abort()
            self._finish()

    def expire(self, error: HboneError) -> bool:
        """Ends a tunnel at rest in good order (rule 6); `error` says why. False, and nothing is done, if it
        is not at rest: a direction has ended already, or bytes wait to be sent."""
        if self.over or self._ended is not None or self._linger is not None or self.buffered_bytes:
            return False
        self.error = error
        self._expired = True
        self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._complete)
        self.downstream.write_eof()
        return True

    # RelayEnd: called by the legs.

    def received(self, leg: Leg, data: Buffer) -> None:
        if self._linger is not None or self.over:
            if self._expired and not self.over:
                self._received_late(leg, data)
            return
        if leg is self.downstream:
            self.sent_bytes += len(data)
            self.upstream.write(data)
        else:
            self.received_bytes += len(data)
            self.downstream.write(data)

    def ended(self, leg: Leg) -> None:
        if self.over:
            return
        other = self._other(leg)
        if self._ended is leg:
            return
        if not (self._expired and other is self.downstream):  # which has had it
            other.write_eof()
        if self._ended is None and (self._linger is None or self._expired):
            self._ended = leg
        else:
            self._complete()

    def failed(self, leg: Leg, error: HboneError) -> None:
        if self.over:
            return
        if self._linger is not None or (self._ended is leg and leg is self.downstream):
            self._complete()
        elif self._ended is leg:
            self.downstream.resume_reading()
            self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._complete)
        else:
            self.error = error
            self.broken = leg
            self._other(leg).abort()
            self._finish()

    def full(self, leg: Leg) -> None:
        self._other(leg).pause_reading()

    def drained(self, leg: Leg) -> None:
        self._other(leg).resume_reading()

    def _other(self, leg: Leg) -> Leg:
        return self.upstream if leg is self.downstream else self.downstream

    def _received_late(self, leg: Leg, data: Buffer) -> None:
        """After the tunnel has expired."""
        if leg is self.downstream:
            self.sent_bytes += len(data)
            self.upstream.write(data)
        elif self.error is not None:
            self.abort(self.error)

    def _complete(self) -> None:
        if not self.over:
            self.downstream.close()
            self.upstream.close()
            self._finish()

    def _finish(self) -> None:
        self.over = True
        if self._linger is not None:
            self._linger.cancel()
        self._finished(self)

"""Two legs joined: what one receives the other sends, until both directions have ended or one leg breaks.

The rules, for each of the two directions on its own:

1. Bytes go on in the order they came, before the end or failure that came after them.
2. `ended` of one leg becomes `write_eof` of the other: TCP FIN, END_STREAM and close_notify stand for each
   other, and the other direction goes on.
3. Once both directions have ended, both legs are closed, which is the second's `write_eof`, and the tunnel is
   complete.
4. A leg that breaks before its `ended` has lost bytes, so the other is aborted: its peer must not take what
   it got for the whole.
5. A leg that breaks after its `ended` has delivered everything and wants nothing more: that is complete too,
   and the other leg is closed. A server may well answer in full and then reset with NO_ERROR (RFC 9113
   section 8.1), an app close. What the other leg's peer still sends then has nobody to read it; a leg that is
   closed drops it, and so destroys nothing that its peer has yet to read.
6. A downstream that resets its stream with NO_ERROR or CANCEL after the upstream has ended, and after all of
   that has gone out to it, is done with it (`StreamDoneError`; ztunnel reads it so, too): no error. But it
   has not ended what it was sending, which may be cut short; so the upstream gets no end for it but is
   aborted, as after any RST_STREAM (RFC 9113 section 8.5). ztunnel sends FIN here.
   With `tls_inside` the bytes have an end of their own (close_notify, RFC 8446 section 6.1), which tells a
   whole from a part. Then a downstream that lets go with NO_ERROR or CANCEL, at whatever time
   (`StreamLeftError`; ztunnel ends each double HBONE with CANCEL), counts as one that has ended: the upstream
   gets all that came, and the end. What it still says is dropped, and it has `LINGER_S` for its own end after
   the last byte has left. A reset of its own is no error then: it may miss the close_notify.
7. Once one direction has ended, the other may be silent for `half_closed_timeout_s` at most; then the tunnel
   is ended as broken off. There are proxies that never pass an END_STREAM on (nghttpx, of a CONNECT), and
   peers that end and forget; each such tunnel would hold its slot for ever.
8. A tunnel at rest can be expired: the downstream gets its end first, as though the upstream had ended, for
   it is the client that opens another connection without an error when a silent one ends. What it says to
   that (close_notify, its own end) still goes upstream, so the mTLS end sees an orderly end as well. If the
   upstream has something to say after all, both are aborted: the client's end was no true one then.

Trailers are no bytes of a tunnel: HTTP/2 has them in requests and responses, TCP has nothing like them. A
stream that ends with trailers has ended like any other, and they are dropped (`Stream.trailers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.errors import HboneError, StreamDoneError, StreamLeftError, StreamResetError
from shared.net.legs.contract import Buffer, Leg
from shared.net.relay.half_closed_clock import HalfClosedClock

HALF_CLOSED_TIMEOUT_S = 3600.0
"""For rule 7: no less than what waits for a late answer may bear, and an hour is where Cloud Run ends any
request, and where Envoy's tcp_proxy takes a connection for forgotten."""


LINGER_S = 5.0
"""How long the client of an expired tunnel, or the upstream of one whose client has let go, may take to its
own end before both are closed."""


class Relay:
    """Joins `downstream` and `upstream`; calls `finished(self)` once, when the tunnel is over.

    `sent_bytes` went from downstream to upstream, `received_bytes` the other way. `error` is None after an
    orderly end; else `broken` is the leg that broke. `half_closed_timeout_s` is rule 7's, in seconds.
    """

    __slots__ = (
        "_ended",
        "_expired",
        "_finished",
        "_half_closed_timeout_s",
        "_left",
        "_timer",
        "_tls_inside",
        "broken",
        "downstream",
        "error",
        "over",
        "received_bytes",
        "sent_bytes",
        "upstream",
    )

    def __init__(
        self,
        downstream: Leg,
        upstream: Leg,
        finished: Callable[[Relay], None],
        *,
        half_closed_timeout_s: float = HALF_CLOSED_TIMEOUT_S,
        sent_bytes: int = 0,
        tls_inside: bool = False,
    ) -> None:
        """`sent_bytes` of the downstream's were sent before. `tls_inside`: rule 6's."""
        self.downstream = downstream
        self.upstream = upstream
        self.sent_bytes = sent_bytes
        self.received_bytes = 0
        self.error: HboneError | None = None
        self.broken: Leg | None = None
        self.over = False
        self._ended: Leg | None = None  # the leg that ended first
        # None before a direction has ended (rule 7), or the tunnel was expired (rule 8).
        self._timer: HalfClosedClock | asyncio.TimerHandle | None = None
        self._half_closed_timeout_s = half_closed_timeout_s
        self._expired = False  # rule 8
        self._tls_inside = tls_inside
        self._left = False  # rule 6: the downstream has let go, and the upstream has yet to end
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

        The downstream is the first: a TLS leg accepts no data before it is joined, while an upstream has been
        dialled or answered by now and accepts data at any time.
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
        """Ends a tunnel at rest in good order (rule 8); `error` says why. False, and nothing is done, if it
        is not at rest: a direction has ended already, or bytes wait to be sent."""
        if self.over or self._ended is not None or self._expired or self.buffered_bytes:
            return False
        self.error = error
        self._expired = True
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._complete)
        self.downstream.write_eof()
        return True

    # RelayEnd: called by the legs.

    def received(self, leg: Leg, data: Buffer) -> None:
        if self.over:
            return
        if leg is self.downstream:
            self.sent_bytes += len(data)
            self.upstream.write(data)
        elif self._expired and self.error is not None:
            self.abort(self.error)
        elif not self._left:
            self.received_bytes += len(data)
            self.downstream.write(data)

    def ended(self, leg: Leg) -> None:
        if self.over or self._ended is leg:
            return
        if self._ended is not None:
            self._complete()  # which ends what the other leg was sending
            return
        self._ended = leg
        if not self._expired:
            downstream_ended = leg is self.downstream
            self._timer = HalfClosedClock(
                self, self._half_closed_timeout_s, downstream_ended=downstream_ended
            )
        if not self._expired or leg is self.downstream:  # else the downstream has had its end
            self._other(leg).write_eof()

    def failed(self, leg: Leg, error: HboneError) -> None:
        if self.over:
            return
        if self._ended is leg or self._expired:
            self._complete()
            return
        if self._left and isinstance(error, StreamResetError) and error.sent_all:
            self._complete()
            return
        if self._tls_inside and leg is self.downstream and isinstance(error, StreamLeftError):
            self._drain()
            return
        if not (self._ended is self.upstream and isinstance(error, StreamDoneError)):
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

    def _drain(self) -> None:
        """The downstream has let go of TLS (rule 6)."""
        if self._ended is self.upstream:
            self._complete()  # which sends what waits, and the end
            return
        self._ended = self.downstream
        self._left = True
        self.upstream.write_eof()
        self.upstream.resume_reading()  # its end comes behind what nobody wants any more
        self._linger(self.upstream.buffered_bytes, 0.0)

    def _linger(self, unsent: int, stuck_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._check_left, unsent, stuck_s)

    def _check_left(self, before: int, stuck_s: float) -> None:
        """Of what waits for the upstream there were `before` bytes, for `stuck_s` seconds."""
        unsent = self.upstream.buffered_bytes
        stuck_s = stuck_s + LINGER_S if unsent == before else 0.0
        if before and stuck_s < self._half_closed_timeout_s:
            self._linger(unsent, stuck_s)
        else:
            self._complete()

    def _complete(self) -> None:
        if not self.over:
            self.downstream.close()
            self.upstream.close()
            self._finish()

    def _finish(self) -> None:
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # Its owner and we name each other: cut here, reference counting frees both.
        finished, self._finished = self._finished, _nobody
        finished(self)


def _nobody(_: Relay) -> None:
    """Takes the place of the owner's callback once that was called."""

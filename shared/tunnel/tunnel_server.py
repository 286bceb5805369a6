"""A tunnel that a peer asked us for: the target is connected first, 200 said after, then bytes are relayed.

Whether a request is for a tunnel, and which target it may have, is the caller's decision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from http import HTTPStatus

from shared.errors import (
    Flag,
    HboneError,
    LimitError,
    NoRouteError,
    RefusedError,
    StreamResetError,
)
from shared.http2.events import Headers
from shared.net.http2.answers import answer
from shared.net.legs.contract import Leg
from shared.net.legs.stream import Stream, header_value
from shared.net.relay.relay import HALF_CLOSED_TIMEOUT_S, Relay
from shared.net.relay.tunnel_clock import TunnelClock
from shared.tasks import spawn
from shared.tunnel.request_context import read_traceparent
from shared.tunnel.tunnel_record import TunnelRecord

GONE = 499
"""For the record only: the peer left before it was answered. Google's status codes have this for cancelled
requests (google/rpc/code.proto), as nginx's log has."""

_CONNECTED: Headers = ((b":status", str(HTTPStatus.OK).encode()),)


class State(Enum):
    """How far a served tunnel has come."""

    CONNECTING = auto()
    OPEN = auto()
    OVER = auto()


class ServedTunnel:
    """One request for a tunnel: connected, answered, relayed, recorded. `finished(self)` is called once, when
    the tunnel is over or refused; `record` is complete then."""

    __slots__ = (
        "_clock",
        "_connecting",
        "_extra",
        "_finished",
        "_half_closed_timeout_s",
        "_loop",
        "_started",
        "_state",
        "record",
        "relay",
        "stream",
    )

    def __init__(
        self,
        stream: Stream,
        record: TunnelRecord,
        finished: Callable[[ServedTunnel], None],
        clock: TunnelClock | None = None,
        *,
        half_closed_timeout_s: float = HALF_CLOSED_TIMEOUT_S,
        extra: Headers = (),
    ) -> None:
        """`record` has what the request says; `clock` ends the tunnel when it is silent, or has lived, for
        too long. The 200 has the headers `extra`."""
        self.stream = stream
        self.record = record
        self.relay: Relay | None = None
        """There while bytes may pass."""
        self._state = State.CONNECTING
        self._clock = clock
        self._extra = extra
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._finished = finished
        self._half_closed_timeout_s = half_closed_timeout_s
        self._connecting: asyncio.Task[None] | None = None
        stream.on_gone = self._gone

    @property
    def buffered_bytes(self) -> int:
        """What is held for both its ends."""
        return self.stream.buffered_bytes if self.relay is None else self.relay.buffered_bytes

    @property
    def age_s(self) -> float:
        """Seconds since the request."""
        return self._loop.time() - self._started

    @property
    def over(self) -> bool:
        """It was refused, or has ended."""
        return self._state is State.OVER

    def carry(self, connect: Callable[[], Awaitable[Leg]], name: str) -> asyncio.Task[None]:
        """Connects the target by `connect`, then says 200 and relays, in a task called `name` that ends then.
        Nothing is connected for a peer that has left; if it leaves meanwhile, `connect` is cancelled.

        `connect` has a deadline of its own, and raises LimitError or NoRouteError (503), another RefusedError
        (401), or any other HboneError (503).
        """
        self._connecting = spawn(self._carry(connect), name=name)
        return self._connecting

    async def _carry(self, connect: Callable[[], Awaitable[Leg]]) -> None:
        if self.over:
            return  # refused meanwhile
        try:
            leg = await connect()
        except HboneError as error:
            denied = isinstance(error, RefusedError) and not isinstance(error, LimitError | NoRouteError)
            self.refuse(HTTPStatus.UNAUTHORIZED if denied else HTTPStatus.SERVICE_UNAVAILABLE, error)
            return
        except BaseException:
            # Cancelled, or a fault of ours, which the task's end reports: the peer must not wait for ever.
            self.refuse(HTTPStatus.INTERNAL_SERVER_ERROR, HboneError("a fault of ours: its log says more"))
            raise
        finally:
            self._connecting = None
        if self.over:
            leg.abort()
            return
        self._open(leg)

    def open(self, leg: Leg) -> None:
        """Says 200 at once, and relays; instead of `carry`."""
        self._open(leg)

    def _open(self, leg: Leg) -> None:
        self._relay(leg)

    def _relay(
        self, leg: Leg, *, sent_bytes: int = 0, tls_inside: bool = False, lifetime_s: float | None = None
    ) -> None:
        """Says 200 and relays to `leg`, which has had the first `sent_bytes`. `lifetime_s` None: the clock's
        own."""
        self._state = State.OPEN
        self.record.opened = True
        self.stream.on_gone = None
        self.stream.respond((*_CONNECTED, *self._extra) if self._extra else _CONNECTED)
        if sent_bytes:
            self.stream.drop_first(sent_bytes)
        relay = self.relay = Relay(
            self.stream,
            leg,
            self._relayed,
            half_closed_timeout_s=self._half_closed_timeout_s,
            sent_bytes=sent_bytes,
            tls_inside=tls_inside,
        )
        relay.start()
        if self._clock is not None:
            self._clock.watch(relay, lifetime_s)

    def refuse(self, status: int, error: HboneError, extra: Headers = ()) -> None:
        """Answers with `status` and why, and the headers `extra`; instead of `carry`, or while it connects.
        Nothing if the tunnel is over."""
        if not self.over:
            answer(self.stream, status, str(error), extra)
            self._fail(status, error)

    def abort(self, error: HboneError) -> None:
        """Ends it at once as broken off, or refuses it while it connects."""
        if self.relay is not None:
            self.relay.abort(error)
        else:
            self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, error)

    def _gone(self, error: StreamResetError) -> None:
        if not self.over:
            connecting, self._connecting = self._connecting, None  # it may not have begun
            self._fail(GONE, error)
            if connecting is not None:
                connecting.cancel()

    def _fail(self, status: int, error: HboneError) -> None:
        record = self.record
        record.fail(error, self.age_s)
        record.sent_bytes = record.received_bytes = 0
        if status == GONE:
            record.flag = Flag.DOWNSTREAM_RESET
        self._end(status)

    def _relayed(self, relay: Relay) -> None:
        if self._clock is not None:
            self._clock.forget(relay)
        self.record.end(relay, self.age_s)
        self._end(HTTPStatus.OK)

    def _end(self, status: int) -> None:
        self._state = State.OVER
        self.relay = None  # the two name each other, and would wait for the garbage collector
        self.stream.on_gone = None  # likewise
        self.record.status = status
        self.record.traceparent = read_traceparent(header_value(self.stream.headers, b"traceparent"))
        self.record.traced_by_peer = self.record.traceparent is not None
        self._finished(self)

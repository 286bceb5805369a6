"""A tunnel that a peer asked us for: the target is connected first, 200 said after, then bytes are relayed.

Owned here: that order, the status of each way to fail, and the record of the tunnel when it is over. Whether
a request is for a tunnel, and which target it may have, is the caller's: krun's tunnel port
(`agent/tunnels/requests.py`) and hgate's HBONE port (`gateway/hbone/hbone_port.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shared.address import Address
from shared.errors import (
    DialError,
    Flag,
    HboneError,
    LimitError,
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

OK = 200
UNAUTHORIZED = 401
"""The rules refuse the target, as ztunnel says it of its own."""
GONE = 499
"""For the record only: the peer left before it was answered. Google's status codes have this for cancelled
requests (google/rpc/code.proto), as nginx's log has."""
INTERNAL = 500
UNAVAILABLE = 503
"""The target cannot be connected; ztunnel's word for it, too."""

_CONNECTED = ((b":status", str(OK).encode()),)


@dataclass(slots=True)
class TunnelRecord:
    """What is known of a tunnel when it is over, for the log and the demo."""

    peer: str
    name: str
    """What the request asked for."""
    target: Address | None
    """What that means, if anything."""
    status: int
    duration_s: float
    """From the request to the end."""
    flag: Flag = Flag.NONE
    sent_bytes: int = 0
    """From the peer to the target."""
    received_bytes: int = 0
    error: HboneError | None = None
    traceparent: str | None = None
    """Of the request, by which its lines at other ends are found."""


class ServedTunnel:
    """One request for a tunnel. `finished(self)` is called once, when the tunnel is over or refused; `record`
    is there then."""

    __slots__ = (
        "_carrying",
        "_clock",
        "_finished",
        "_half_closed_timeout_s",
        "_loop",
        "name",
        "record",
        "relay",
        "started",
        "stream",
        "target",
    )

    def __init__(
        self,
        stream: Stream,
        name: str,
        target: Address | None,
        finished: Callable[[ServedTunnel], None],
        clock: TunnelClock | None = None,
        *,
        half_closed_timeout_s: float = HALF_CLOSED_TIMEOUT_S,
    ) -> None:
        """`clock` watches how long it is silent, and lives."""
        self._clock = clock
        self.stream = stream
        self.name = name
        self.target = target
        self.relay: Relay | None = None
        """There while bytes may pass."""
        self.record: TunnelRecord | None = None
        self._loop = asyncio.get_running_loop()
        self.started = self._loop.time()
        self._finished = finished
        self._half_closed_timeout_s = half_closed_timeout_s
        self._carrying: asyncio.Task[None] | None = None
        stream.on_gone = self._gone

    @property
    def buffered_bytes(self) -> int:
        """What is held for both its ends."""
        return self.stream.buffered_bytes if self.relay is None else self.relay.buffered_bytes

    def carry(self, connect: Callable[[], Awaitable[Leg]], name: str) -> asyncio.Task[None]:
        """Connects the target by `connect`, then says 200 and relays, in a task called `name` that ends then.
        Nothing is connected for a peer that has left, and what is under way when it leaves is cancelled.

        `connect` has a deadline of its own, and raises DialError or LimitError (503), or another RefusedError
        (401).
        """
        self._carrying = spawn(self._carry(connect), name=name)
        return self._carrying

    async def _carry(self, connect: Callable[[], Awaitable[Leg]]) -> None:
        if self.record is not None:
            return  # refused meanwhile
        try:
            leg = await connect()
        except (DialError, LimitError) as error:
            self.refuse(UNAVAILABLE, error)
            return
        except RefusedError as error:
            self.refuse(UNAUTHORIZED, error)
            return
        except BaseException:
            # Cancelled, or a fault of ours, which the task's end reports: the peer must not wait for ever.
            self.refuse(INTERNAL, HboneError("a fault of ours: its log says more"))
            raise
        finally:
            self._carrying = None
        if self.record is not None:
            leg.abort()
            return
        self.stream.on_gone = None
        self.stream.respond(_CONNECTED)
        relay = self.relay = Relay(
            self.stream, leg, self._over, half_closed_timeout_s=self._half_closed_timeout_s
        )
        relay.start()
        if self._clock is not None:
            self._clock.watch(relay)

    def refuse(self, status: int, error: HboneError, extra: Headers = ()) -> None:
        """Answers with `status` and why, and the headers `extra`; instead of `carry`, or while it connects.
        Nothing if the tunnel is over."""
        if self.record is None:
            answer(self.stream, status, str(error), extra)
            self._end(status, error.flag, error)

    def abort(self, error: HboneError) -> None:
        """Ends it at once as broken off, or refuses it while it connects."""
        if self.relay is not None:
            self.relay.abort(error)
        else:
            self.refuse(UNAVAILABLE, error)

    def _gone(self, error: StreamResetError) -> None:
        if self.record is None:
            self._end(GONE, Flag.DOWNSTREAM_RESET, error)
            carrying, self._carrying = self._carrying, None  # it may not have begun
            if carrying is not None:
                carrying.cancel()

    def _over(self, relay: Relay) -> None:
        if self._clock is not None:
            self._clock.forget(relay)
        flag = Flag.NONE if relay.error is None else relay.error.flag
        self._end(OK, Flag.DOWNSTREAM_RESET if relay.broken is relay.downstream else flag, relay.error)

    def _end(self, status: int, flag: Flag, error: HboneError | None) -> None:
        relay = self.relay
        self.relay = None  # the two name each other, and would wait for the garbage collector
        self.stream.on_gone = None  # likewise
        self.record = TunnelRecord(
            self.stream.connection.peer_name,
            self.name,
            self.target,
            status,
            self._loop.time() - self.started,
            flag,
            relay.sent_bytes if relay else 0,
            relay.received_bytes if relay else 0,
            error,
            read_traceparent(header_value(self.stream.headers, b"traceparent")),
        )
        self._finished(self)

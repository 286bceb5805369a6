"""One connection of the app, led through the gateway to a target in the mesh, from its accept to its record.

A tunnel goes this way, from top to bottom: the gateway is asked, with the workload's certificate; the client
is told what came of it, in its own language; a relay carries; a record is written.

The rules:

1. A client is told that it is connected only once the gateway has said 200, which it does once the target is
   connected.
2. A request that the gateway cannot have dealt with is sent again at once. Nothing is sent again after a
   pause: an app knows better than krun whether it can wait, and a target that is down should not look slow.
3. What goes with a request, and perhaps with its repetition, is the beginning of a TLS connection only, if it
   is there by then: nothing else may arrive twice.
4. An app that has gone leaves its request to be answered, and its stream is reset then (`opening`, rule 4).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator

from agent.config.egress_settings import EgressSettings
from agent.egress.gateway_upstream import GatewayUpstream
from shared.address import Address
from shared.errors import ClientGoneError, HboneError, LimitError
from shared.net.dial import Origin
from shared.net.legs.accepted import AcceptedLeg
from shared.net.legs.stream import Stream
from shared.net.pool.pool import Pool
from shared.net.relay.relay import Relay
from shared.net.relay.tunnel_clock import TunnelClock
from shared.tasks import report, spawn
from shared.tunnel import request_context, tunnel_request
from shared.tunnel.deadlines import Deadlines
from shared.tunnel.opening import Opening
from shared.tunnel.retry import RetryBudget, RetryRules
from shared.tunnel.tunnel_record import TunnelRecord

LOCAL, CONNECT, SOCKS, REQUEST = "egress/local", "egress/connect", "egress/socks", "egress/request"
"""How a tunnel was asked for: the label `route` of its metrics, and its access log's `route`. No target of
the tunnel port has a slash in its name."""

RULES = RetryRules(pauses=False)

FIRST_FLIGHT_BYTES = 64 << 10
"""As much as a leg keeps before it pauses its client."""

TLS_BEGINS = b"\x16\x03"
"""A handshake record of any version (RFC 8446 section 5.1)."""


class EgressTunnels:
    """The tunnels to one gateway, and what they share."""

    def __init__(
        self,
        settings: EgressSettings,
        origin: Origin,
        pool: Pool,
        clock: TunnelClock,
        *,
        baggage: bytes,
        half_closed_timeout_s: float,
        refusal: Callable[[], LimitError | None],
        over: Callable[[TunnelRecord], None],
    ) -> None:
        """`origin` is the gateway; `baggage` says who we are, as ztunnel does. `refusal()` says why no tunnel
        is opened now, if so; `over(record)` is told of each that has ended, or was refused."""
        self.settings = settings
        self.origin = origin
        self.pool = pool
        self.clock = clock
        self._told = [(b"baggage", baggage)] if baggage else []
        self.half_closed_timeout_s = half_closed_timeout_s
        self.refusal = refusal
        self.over = over
        self.open: set[EgressTunnel] = set()
        """Those that are being opened included."""
        self.of_legs: dict[AcceptedLeg, EgressTunnel] = {}
        """Those that are being opened, whose client may leave."""
        self.retries: Counter[tuple[str, str]] = Counter()
        """By route and reason."""
        self._deadlines: Deadlines[Opening] = Deadlines(Opening.overdue)
        self._budget = RetryBudget()
        self._traceparents: Iterator[bytes] = request_context.traceparents()

    def record(self, peer: str, route: str, target: Address | None) -> TunnelRecord:
        """Of a tunnel that `peer` wants, before anything is known of it."""
        record = TunnelRecord(peer, route=route, origin=f"https://{self.origin.address}")
        record.target = self.origin.address
        record.name = "" if target is None else str(target)
        return record

    def opening(self, record: TunnelRecord, about_to_send: Callable[[], None] = lambda: None) -> Opening:
        """Asks the gateway for what `record` names. Raises LimitError if no tunnel is opened now."""
        refusal = self.refusal()
        if refusal is not None:
            raise refusal
        traceparent = next(self._traceparents)
        record.traceparent = traceparent.decode()
        assert record.name is not None
        headers = tunnel_request.connect(
            record.name,
            None,
            [
                *self._told,
                (b"forwarded", request_context.forwarded(record.peer)),
                (b"traceparent", traceparent),
            ],
        )

        def retried(reason: str) -> None:
            self.retries[record.route, reason] += 1

        upstream = GatewayUpstream(
            self.pool, self.origin, headers, about_to_send=about_to_send, retried=retried
        )
        return Opening(
            upstream, self.settings.timeout_s, RULES, budget=self._budget, deadlines=self._deadlines
        )


class EgressTunnel:
    """One connection, led to one target."""

    def __init__(
        self,
        tunnels: EgressTunnels,
        leg: AcceptedLeg,
        target: Address,
        route: str,
        *,
        opened: Callable[[], None] = lambda: None,
        refused: Callable[[HboneError], None],
    ) -> None:
        """`opened()` is called before the first byte is relayed; or `refused(error)`, which tells the client
        and ends its connection."""
        self.record = tunnels.record(leg.peer_name, route, target)
        self.relay: Relay | None = None
        """There while bytes may pass."""
        self._tunnels = tunnels
        self._leg = leg
        self._opened = opened
        self._refused = refused
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._opening: Opening | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        tunnels.open.add(self)
        tunnels.of_legs[leg] = self

    @property
    def age_s(self) -> float:
        """Seconds since it was asked for."""
        return self._loop.time() - self._started

    @property
    def buffered_bytes(self) -> int:
        """What is held for both its ends."""
        return self._leg.buffered_bytes if self.relay is None else self.relay.buffered_bytes

    # 1. The gateway is asked.

    def begin(self) -> None:
        """Asks for it."""
        try:
            self._opening = self._tunnels.opening(self.record, self._add_first_flight)
        except LimitError as error:
            self._refuse(error)
            return
        if not self._opening.begin(self._answered, self._wait):
            self._wait()

    def refuse(self, error: HboneError) -> None:
        """Refuses it unasked."""
        self._refuse(error)

    def _add_first_flight(self) -> None:
        opening = self._opening
        if opening is not None and self._leg.first(len(TLS_BEGINS)) == TLS_BEGINS:
            opening.first_flight = self._leg.first(FIRST_FLIGHT_BYTES)

    def _wait(self) -> None:
        self._task = spawn(self._run(), name=f"egress to {self.record.name}")

    async def _run(self) -> None:
        assert self._opening is not None
        try:
            stream = await self._opening.run()
        except HboneError as error:
            self._refuse(ClientGoneError() if self._leg.lost else error)
            return
        except BaseException:
            # Cancelled after a refusal, which stays; or a fault of ours, which the task's end reports.
            self._refuse(HboneError("a fault in krun: its log says more"))
            raise
        finally:
            self._task = None
        self._answered(stream)

    # 2. It carries.

    def _answered(self, stream: Stream) -> None:
        try:
            self._carry(stream)
        except Exception as error:  # costs one tunnel, not the connection to the gateway that called us back
            report(f"egress to {self.record.name}", error)
            if self.relay is None:
                stream.abort()
            self.abort(HboneError("a fault in krun: its log says more"))

    def _carry(self, stream: Stream) -> None:
        if self._is_over:
            stream.abort()
            return
        tunnels, record, opening = self._tunnels, self.record, self._opening
        assert opening is not None
        self._note(opening)
        self._opening = None
        tunnels.of_legs.pop(self._leg, None)
        record.setup_s = self.age_s
        record.opened = True
        self._opened()
        sent_bytes = len(opening.first_flight)
        self._leg.drop_first(sent_bytes)
        relay = self.relay = Relay(
            self._leg,
            stream,
            self._relayed,
            half_closed_timeout_s=tunnels.half_closed_timeout_s,
            sent_bytes=sent_bytes,
        )
        relay.start()
        tunnels.clock.watch(relay)

    # 3. Its end.

    def abort(self, error: HboneError) -> None:
        """Ends it as broken off, or refuses it while it is being opened."""
        if self.relay is not None:
            self.relay.abort(error)
        else:
            self._give_up(error)

    def client_gone(self) -> None:
        """The client broke off before it was open."""
        if self._opening is None or self._opening.abandon():
            self._give_up(ClientGoneError())

    def _give_up(self, error: HboneError) -> None:
        opening, task = self._opening, self._task
        self._refuse(error)
        if task is not None:
            task.cancel()
        if opening is not None:
            opening.cancel()

    def _refuse(self, error: HboneError) -> None:
        if self._is_over or self.relay is not None:
            return
        if self._opening is not None:
            self._note(self._opening)
            self._opening = None
        self.record.stream = None
        self.record.fail(error, self.age_s)
        self._refused(error)
        self._end()

    def _relayed(self, relay: Relay) -> None:
        self._tunnels.clock.forget(relay)
        self.record.end(relay, self.age_s)
        self.relay = None
        self._end()

    def _end(self) -> None:
        self._is_over = True
        self._tunnels.open.discard(self)
        self._tunnels.of_legs.pop(self._leg, None)
        self._tunnels.over(self.record)

    def _note(self, opening: Opening) -> None:
        note_opening(self.record, opening)


def note_opening(record: TunnelRecord, opening: Opening) -> None:
    """Adds what is known of how it was opened."""
    record.attempts = opening.attempts
    record.status = opening.status
    record.stream = opening.stream_id

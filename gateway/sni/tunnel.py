"""One connection through the gateway, from its ClientHello to its line in the access log.

A `Tunnel` goes this way, from top to bottom: its name leads to a route; the route says how it is opened (a
stream to a service or to a workload, or plain TCP); a relay carries; a record is written. Whatever goes wrong
before the relay is there is told to the client as a TLS alert; of what the far side says only the body of a
200 reaches the client. What the client has sent goes with the request, unless the route says otherwise, and
stays with the downstream leg until the answer, so nothing is lost by waiting or by asking again.

Most tunnels never wait for anything but their answer, which comes by callback: they have no task. One is
started for what has to be waited for, and ends when the tunnel is open or refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from enum import Enum, auto
from functools import partial
from typing import Any

from gateway.config.limit_settings import Limits
from gateway.ports.admission import Admission, report_refusal
from gateway.ports.hello import ClientLeg, turn_away
from gateway.reverse.reverse_port import ReverseListener
from gateway.reverse.workload_upstream import WORKLOAD_RULES
from gateway.rules.routes import MAX_CACHED_TARGETS, RouteTable, Target
from gateway.sni.forward import Forward
from gateway.sni.upstream import ServiceUpstream, TargetRequest, Upstreams
from shared.address import Address
from shared.errors import ClientGoneError, DialError, HboneError
from shared.net.legs.stream import Stream
from shared.net.relay.relay import Relay
from shared.net.relay.splice import SpliceRelay
from shared.net.relay.tunnel_clock import TunnelClock
from shared.ops.access_log import AccessLog
from shared.ops.metrics import RouteCounts, TunnelMetrics
from shared.tasks import report, spawn
from shared.tls.client_hello import ClientHello
from shared.tunnel import request_context, tunnel_request
from shared.tunnel.deadlines import Deadlines
from shared.tunnel.opening import Opening
from shared.tunnel.tunnel_record import TunnelRecord

FIRST_FLIGHT_BYTES = 64 << 10
"""What goes with a tunnel request at most: as much as a leg keeps before it pauses its client."""


class Tunnels:
    """The open tunnels, and what they share. `routes` may be replaced at any time; open tunnels stay."""

    def __init__(
        self,
        routes: RouteTable,
        upstreams: Upstreams,
        access_log: AccessLog,
        metrics: TunnelMetrics,
        admission: Admission,
        clock: TunnelClock,
        *,
        forward: Forward,
        reverse: ReverseListener | None = None,
        limits: Limits,
        changed: Callable[[], None] = lambda: None,
        traceparents: Iterator[bytes] | None = None,
    ) -> None:
        """`reverse` is where the workloads of `reverse` routes register. `changed` is called when there is
        one tunnel less. `traceparents` are those of new traces, by default such that are not recorded."""
        self.routes = routes
        self.use_limits(limits)
        self.open: set[Tunnel] = set()
        """Those whose client's connection is not gone, be they opening or over."""
        self.upstreams = upstreams
        self.forward = forward
        self.reverse = reverse
        self.access_log = access_log
        self.metrics = metrics
        self.admission = admission
        self.clock = clock
        self.changed = changed
        self.deadlines: Deadlines[Opening] = Deadlines(Opening.overdue)
        self.loop = asyncio.get_running_loop()
        self.traceparents = traceparents or request_context.traceparents()
        self.times_phases = traceparents is not None
        self.names: dict[str, str] = {}
        """What clients asked for: a name is kept once, not for each tunnel."""

    def use_limits(self, limits: Limits) -> None:
        """Goes by `limits` for tunnels that open from now on."""
        self.half_closed_timeout_s = limits.half_closed_timeout_s

    def accept(self, leg: ClientLeg, peer: str, hello: ClientHello, started: float) -> None:
        """Carries the connection of `leg`, admitted from `peer` at the loop's time `started`, to its end."""
        if len(self.names) >= MAX_CACHED_TARGETS:
            self.names.clear()
        record = TunnelRecord(peer, hello.server_name or "")
        if self.times_phases:
            record.phases = []
        tunnel = Tunnel(self, leg, record, started)
        self.open.add(tunnel)
        leg.when_lost(tunnel.client_gone)
        try:
            tunnel.begin(hello)
        except Exception as error:
            tunnel.fail(error)

    def abort_all(self, error: HboneError) -> None:
        """Ends all tunnels as broken off; those that are being opened are refused."""
        for tunnel in list(self.open):
            tunnel.abort(error)

    def count_bytes(self) -> None:
        """Brings the byte counters up to date with the tunnels that are still open."""
        for tunnel in self.open:
            tunnel.count_bytes()


class State(Enum):
    """How far a tunnel has come."""

    OPENING = auto()
    OPEN = auto()
    OVER = auto()
    """Its line is written. Its last bytes may still have to leave."""
    GONE = auto()
    """It was refused, or its client's connection is gone, too."""


OPENING, OPEN, OVER, GONE = State  # Python 3.11 takes 0.2 µs to look one up in its enum


class Tunnel:
    """One connection, from its hello on."""

    __slots__ = (
        "_counted_received",
        "_counted_sent",
        "_counts",
        "_lifetime_s",
        "_on_route",
        "_opening",
        "_started",
        "_state",
        "_task",
        "_traceparent",
        "_tunnels",
        "leg",
        "record",
        "relay",
    )

    _counts: RouteCounts
    _lifetime_s: float
    _traceparent: bytes

    def __init__(self, tunnels: Tunnels, leg: ClientLeg, record: TunnelRecord, started: float) -> None:
        """`started` is the loop's time of the accept."""
        self.leg = leg
        self.record = record
        self.relay: Relay | SpliceRelay | None = None
        self._tunnels = tunnels
        self._started = started
        self._state = OPENING
        self._on_route = False  # it is counted among its route's connections
        self._opening: Opening | None = None
        self._task: asyncio.Task[None] | None = None  # that waits for what it is opened with
        self._counted_sent = 0
        self._counted_received = 0

    @property
    def buffered_bytes(self) -> int:
        """What is held for both its ends."""
        return self.leg.buffered_bytes if self.relay is None else self.relay.buffered_bytes

    # 1. Its name leads to a route.

    def begin(self, hello: ClientHello) -> None:
        """Opens it, as the route of the hello's name says."""
        tunnels, record = self._tunnels, self.record
        try:
            target = tunnels.routes.find(record.sni)
            record.sni = tunnels.names.setdefault(record.sni, record.sni)
            request = tunnels.upstreams.request_of(target) if target.kind == "tunnel" else None
            if request is not None:
                record.target, record.origin = request.address, request.url
                record.name = target.connect_target or None
            else:
                record.target = target.dial
                record.origin = target.url if target.kind == "reverse" else None
            route = tunnels.routes.routes[target.route]
            record.route = route.name
            self._lifetime_s = route.lifetime_s(tunnels.clock.lifetime_s)
            tunnels.admission.enter_route(route)
            tunnels.admission.opening.add(route.name)
            self._on_route = True
        except HboneError as error:
            self._refuse(ClientGoneError() if self.leg.lost else error)
            return
        if target.kind == "forward":
            self._wait_for(partial(self._dial, target, hello.alpn))
            return
        at_once = route.first_flight == "with_request"
        first_flight = self.leg.first(FIRST_FLIGHT_BYTES) if at_once else b""
        if request is not None:
            self._ask_service(request, first_flight)
        else:
            self._ask_workload(target, first_flight)

    # 2. It is opened: a stream, or plain TCP.

    def _ask_service(self, request: TargetRequest, first_flight: bytes) -> None:
        upstreams = self._tunnels.upstreams
        self._traceparent = next(self._tunnels.traceparents)
        upstream = ServiceUpstream(upstreams, request, self.record, self._traceparent)
        self._ask(
            Opening(
                upstream,
                upstreams.response_timeout_s,
                upstreams.rules,
                budget=request.budget,
                deadlines=self._tunnels.deadlines,
                first_flight=first_flight,
                cold_start_s=request.target.cold_start_s,
            )
        )

    def _ask_workload(self, target: Target, first_flight: bytes) -> None:
        tunnels = self._tunnels
        if tunnels.reverse is None:
            self._refuse(DialError(f"reverse {target.host}: the port for it opens at the next start"))
            return
        self._traceparent = next(tunnels.traceparents)
        headers = tunnel_request.post(
            "https", target.authority, target.path, None, [(b"traceparent", self._traceparent)]
        )
        upstream = tunnels.reverse.upstream(target.host, headers, self.record)
        timeout_s = tunnels.upstreams.response_timeout_s
        self._ask(
            Opening(
                upstream,
                timeout_s,
                WORKLOAD_RULES,
                deadlines=tunnels.deadlines,
                first_flight=first_flight,
            )
        )

    def _ask(self, opening: Opening) -> None:
        self._opening = opening
        if not opening.begin(self._answered, self._wait_for_answer):
            self._wait_for_answer()

    def _wait_for_answer(self) -> None:
        assert self._opening is not None
        self._wait_for(self._opening.run)

    def _answered(self, upstream: Stream | SpliceRelay) -> None:
        try:
            self._carry(upstream)
        except Exception as error:
            self.fail(error)

    async def _dial(self, target: Target, alpn: Iterable[str]) -> SpliceRelay:
        tunnels = self._tunnels
        timeout_s = tunnels.half_closed_timeout_s
        return await tunnels.forward.open(
            *(self.leg, target, alpn, self._relayed, timeout_s), dialled=self._dialled
        )

    def _dialled(self, endpoint: Address) -> None:
        self.record.target = endpoint

    def _wait_for(self, way: Callable[[], Awaitable[Stream | SpliceRelay]]) -> None:
        self._task = spawn(self._wait(way), name=f"tunnel {self.record.peer}")

    async def _wait(self, way: Callable[[], Awaitable[Stream | SpliceRelay]]) -> None:
        try:
            upstream = await way()
        except HboneError as error:
            self._refuse(ClientGoneError() if self.leg.lost else error)
            return
        except BaseException:
            # Cancelled after a refusal, which stays; or a fault of ours, which the task's end reports.
            self._refuse(_fault())
            raise
        finally:
            self._task = None
        self._answered(upstream)

    # 3. It carries.

    def _carry(self, upstream: Stream | SpliceRelay) -> None:
        tunnels, record = self._tunnels, self.record
        self._note_opening()
        opening, self._opening = self._opening, None
        record.setup_s = tunnels.loop.time() - self._started
        tunnels.metrics.tunnel_setup(record.setup_s)
        tunnels.admission.opening.drop(record.route)
        self._counts = tunnels.metrics.route(record.route)
        self._counts.opened()
        self.leg.when_lost(None)
        if isinstance(upstream, Stream):
            timeout_s = tunnels.half_closed_timeout_s
            sent_bytes = 0 if opening is None else len(opening.first_flight)
            relay: Relay | SpliceRelay = Relay(
                self.leg,
                upstream,
                self._relayed,
                half_closed_timeout_s=timeout_s,
                sent_bytes=sent_bytes,
            )
            if sent_bytes:
                self.leg.drop_first(sent_bytes)
        else:
            relay = upstream
        self.relay = relay
        self._state = OPEN
        record.opened = True
        relay.start()
        tunnels.clock.watch(relay, self._lifetime_s)

    def count_bytes(self) -> None:
        """Adds what has passed since the last call to the metrics."""
        relay = self.relay
        if relay is not None:
            counts = self._counts
            counts.sent_bytes += relay.sent_bytes - self._counted_sent
            counts.received_bytes += relay.received_bytes - self._counted_received
            self._counted_sent, self._counted_received = relay.sent_bytes, relay.received_bytes

    # 4. Its end.

    def abort(self, error: HboneError) -> None:
        """Ends it as broken off, refuses it while it is being opened, or drops its last bytes."""
        if self._state is OPENING:
            self._give_up(error)
        elif self.relay is not None:
            self.relay.abort(error)
            self.leg.abort()  # if it is over, and its last bytes are leaving

    def fail(self, error: Exception) -> None:
        """A fault of ours costs one tunnel, not whoever called us back."""
        report(f"tunnel {self.record.peer}", error)
        self.abort(_fault())

    def client_gone(self) -> None:
        """The client broke off (RST) before it was open: there is nobody to open it for. A client that has
        only ended its sending (FIN) is not gone: it may well wait for what the far side has to say."""
        opening = self._opening
        if opening is None or opening.abandon():
            self._give_up(ClientGoneError())

    def _give_up(self, error: HboneError) -> None:
        """Refuses it, and stops whatever opens it."""
        opening, task = self._opening, self._task
        self._refuse(error)
        if task is not None:
            task.cancel()
        if opening is not None:
            opening.cancel()

    def _refuse(self, error: HboneError) -> None:
        """Tells the client, and writes its line; nothing if that has been done."""
        if self._state is not OPENING:
            return
        self._state = GONE
        tunnels, record = self._tunnels, self.record
        tunnels.open.discard(self)
        if self._on_route:
            tunnels.admission.opening.drop(record.route)
        self._leave()
        turn_away(self.leg.release(), error.alert)
        self._note_opening()
        self._opening = None
        record.stream = None  # the line of a refusal has none
        report_refusal(
            record,
            error,
            tunnels.loop.time() - self._started,
            access_log=tunnels.access_log,
            metrics=tunnels.metrics,
            refusals=tunnels.admission.refusals,
        )
        tunnels.changed()

    def _relayed(self, relay: Relay | SpliceRelay) -> None:
        """It is over; its last bytes may still have to leave."""
        tunnels, record = self._tunnels, self.record
        self._state = OVER
        tunnels.clock.forget(relay)
        self.count_bytes()
        record.end(relay, tunnels.loop.time() - self._started)
        self._counts.closed(record.flag)
        if record.error is not None:
            tunnels.admission.refusals.recent.add(record)
        record.write(tunnels.access_log)
        self.leg.when_lost(self._client_left)

    def _client_left(self) -> None:
        self._state = GONE
        self._tunnels.open.discard(self)
        self._leave()
        self._tunnels.changed()

    def _leave(self) -> None:
        admission = self._tunnels.admission
        admission.leave(self.record.peer)
        if self._on_route:
            admission.leave_route(self.record.route)

    # What is known of it.

    def row(self) -> dict[str, Any]:
        """For the admin port's dump."""
        self._note_opening()
        record, relay = self.record, self.relay
        return {
            "src.addr": record.peer,
            "sni": record.sni,
            "route": record.route,
            "dst.addr": str(record.target) if record.target else None,
            "stream": record.stream,
            "age_s": round(self._tunnels.loop.time() - self._started, 3),
            "bytes_sent": relay.sent_bytes if relay else 0,
            "bytes_recv": relay.received_bytes if relay else 0,
        }

    def _note_opening(self) -> None:
        opening, record = self._opening, self.record
        if opening is not None:
            record.attempts = opening.attempts
            record.status = opening.status
            record.stream = opening.stream_id
            if record.stream is not None:
                record.traceparent = self._traceparent.decode()


def _fault() -> HboneError:
    return HboneError("a fault in the gateway: its log says more")

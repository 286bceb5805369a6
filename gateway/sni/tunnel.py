"""The story of one connection through the gateway: from its ClientHello to its line in the access log.

name → route → stream to the target (`upstream.py`) → relay. Whatever goes wrong before the relay
stands is told to the client as a TLS alert; nothing the far side says but a 200's body ever reaches the
client. The hello stays with the downstream leg until then, so nothing is lost by waiting.

Most tunnels never wait for anything but their answer, which comes by callback: they have no task. One is
started for what has to be waited for, and ends when the tunnel stands or is refused.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

from gateway.config.limit_settings import Limits
from gateway.ports.admission import Admission
from gateway.ports.hello import ClientLeg, turn_away
from gateway.reverse.reverse_port import ReverseListener
from gateway.rules.routes import MAX_CACHED_TARGETS, RouteTable, Target
from gateway.sni.forward import Forward
from gateway.sni.opening import Opening
from gateway.sni.upstream import Upstreams
from shared.address import Address
from shared.errors import ClientGoneError, DialError, Flag, HboneError, LimitError, StatusError
from shared.net.legs.stream import Stream
from shared.net.relay.relay import Relay
from shared.net.relay.splice import SpliceRelay
from shared.net.relay.tunnel_clock import TunnelClock
from shared.ops.access_log import AccessLog
from shared.ops.metrics import RouteCounts, TunnelMetrics
from shared.tasks import contained, spawn
from shared.tls.client_hello import ClientHello
from shared.tunnel import request_context, tunnel_request

TRACES_AT_ONCE = 64
"""Traceparents whose random bytes are drawn together: drawing for each took 0.6 % of the samples
of a profile of new tunnels."""


def _traceparents() -> Iterator[bytes]:
    size = request_context.TRACEPARENT_BYTES
    while True:
        drawn = os.urandom(TRACES_AT_ONCE * size)
        for at in range(0, len(drawn), size):
            yield request_context.traceparent(drawn[at : at + size])


def _fault() -> HboneError:
    return HboneError("a fault in the gateway: its log says more")


@dataclass(slots=True, eq=False)
class Tunnel:
    """What is known of one tunnel; the access log's line is made of it."""

    owner: Tunnels
    leg: ClientLeg
    peer: str
    sni: str
    started: float
    traceparent: bytes
    opening: Opening | None = None
    """Its way to a stream, while it is on it."""
    task: asyncio.Task[None] | None = None
    """That opens it, if something has to be waited for."""
    route: str = ""
    target: Target | None = None
    stream_id: int | None = None
    status: int | None = None
    setup_s: float | None = None
    relay: Relay | SpliceRelay | None = None
    counts: RouteCounts | None = None
    counted_sent: int = 0
    counted_received: int = 0
    attempts: int = 0
    awaiting_answer: bool = False
    lifetime_s: float = 0.0
    """Of tunnels on its route."""
    on_route: bool = False
    """Whether it is counted among its route's connections."""

    @property
    def name(self) -> str:
        """For the log."""
        return f"tunnel {self.peer}"

    @property
    def buffered_bytes(self) -> int:
        """What is held for both its ends."""
        return self.leg.buffered_bytes if self.relay is None else self.relay.buffered_bytes

    # Called back by its opening, its leg and its relay.

    def answered(self, stream: Stream) -> None:
        """Its stream is there."""
        self.opening = None
        self.owner.stand(self, stream)

    def has_to_wait(self) -> None:
        """Its opening cannot go on by itself."""
        self.owner.go_on(self)

    def client_gone(self) -> None:
        """Its client has broken off before it stood."""
        self.owner.client_gone(self)

    def finished(self, relay: Relay | SpliceRelay) -> None:
        """It is over."""
        self.owner.finished(self, relay)

    def client_left(self) -> None:
        """It is over, and so is its client's connection, with its last bytes."""
        self.owner.client_left(self)

    def abort(self, error: HboneError) -> None:
        """Ends it as broken off, refuses it while it is being opened, or drops its last bytes."""
        self.owner.end(self, error)

    @property
    def gone(self) -> bool:
        """The client's connection is lost (RST, not FIN)."""
        return self.leg.lost


class Tunnels:
    """Carries connections whose hello is whole. `routes` may be replaced at any time; open tunnels stay."""

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
        limits: Limits,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.routes = routes
        self.reverse: ReverseListener | None = None
        """Where the workloads of `reverse` routes register."""
        self.use_limits(limits)
        self.open: set[Tunnel] = set()
        """Every connection from its hello until it is gone, with all that was written to it."""
        self._upstreams = upstreams
        self._forward = forward
        self._access_log = access_log
        self._metrics = metrics
        self._admission = admission
        self._clock = clock
        self._changed = changed
        self._traceparents = _traceparents()
        self._names: dict[str, str] = {}  # what clients asked for: a name is kept once, not for each tunnel
        self._loop = asyncio.get_running_loop()

    def use_limits(self, limits: Limits) -> None:
        """Goes by `limits` for tunnels that open from now on."""
        self.half_closed_timeout_s = limits.half_closed_timeout_s

    def take(self, leg: ClientLeg, peer: str, hello: ClientHello, started: float) -> None:
        """Carries the connection of `leg`, admitted from `peer` at the loop's time `started`, to its end."""
        tunnel = Tunnel(self, leg, peer, hello.server_name or "", started, next(self._traceparents))
        self.open.add(tunnel)
        leg.when_lost(tunnel.client_gone)
        self._contain(tunnel, self._begin, tunnel, hello)

    def abort_all(self, error: HboneError) -> None:
        """Ends all tunnels as broken off; those that are being opened are refused."""
        for tunnel in list(self.open):
            self.end(tunnel, error)

    def end(self, tunnel: Tunnel, error: HboneError) -> None:
        """Ends one as broken off, or refuses it; what is left of one that is over is dropped."""
        if tunnel.relay is None:
            self._refuse(tunnel, error)
            self._give_up(tunnel)
        else:
            tunnel.relay.abort(error)
            tunnel.leg.abort()  # if the tunnel is over, and its last bytes are leaving

    def count_bytes(self) -> None:
        """Brings the byte counters up to date with the tunnels that are still open."""
        for tunnel in self.open:
            self._count(tunnel)

    # Opening one, in the order in which it goes.

    def _begin(self, tunnel: Tunnel, hello: ClientHello) -> None:
        try:
            target = tunnel.target = self.routes.find(tunnel.sni)
            if len(self._names) >= MAX_CACHED_TARGETS:
                self._names.clear()
            tunnel.sni = self._names.setdefault(tunnel.sni, tunnel.sni)
            route = self.routes.routes[target.route]
            tunnel.route = route.host
            tunnel.lifetime_s = route.lifetime_s(self._clock.lifetime_s)
            self._admission.enter_route(route)
            tunnel.on_route = True
        except HboneError as error:
            self._refuse(tunnel, ClientGoneError() if tunnel.gone else error)
            return
        if target.kind == "forward":
            self._wait_for(tunnel, partial(self._open_forward, tunnel, target, hello.alpn))
        elif target.kind == "reverse":
            self._wait_for(tunnel, partial(self._open_reverse, tunnel, target))
        else:
            tunnel.opening = Opening(self._upstreams, tunnel, target)
            tunnel.opening.begin()

    def go_on(self, tunnel: Tunnel) -> None:
        """Its opening has to wait for something: a task does that."""
        if tunnel.opening is not None:
            self._wait_for(tunnel, tunnel.opening.run)

    def _wait_for(self, tunnel: Tunnel, way: Callable[[], Awaitable[Stream | SpliceRelay]]) -> None:
        tunnel.task = spawn(self._wait(tunnel, way), name=tunnel.name)

    async def _wait(self, tunnel: Tunnel, way: Callable[[], Awaitable[Stream | SpliceRelay]]) -> None:
        try:
            upstream = await way()
        except HboneError as error:
            self._refuse(tunnel, ClientGoneError() if tunnel.gone else error)
            return
        except BaseException:
            if tunnel in self.open:  # not by `end`, so it is a fault of ours, which the task's end reports
                self._refuse(tunnel, _fault())
            raise
        finally:
            tunnel.task = tunnel.opening = None  # an open tunnel has none, and one that is refused is let go
        self.stand(tunnel, upstream)

    def stand(self, tunnel: Tunnel, upstream: Stream | SpliceRelay) -> None:
        """Its upstream is there: from now on it carries."""
        self._contain(tunnel, self._start, tunnel, upstream)

    def _start(self, tunnel: Tunnel, upstream: Stream | SpliceRelay) -> None:
        tunnel.setup_s = self._loop.time() - tunnel.started
        self._metrics.tunnel_setup(tunnel.setup_s)
        counts = tunnel.counts = self._metrics.route(tunnel.route)
        counts.opened()
        tunnel.leg.when_lost(None)
        relay: Relay | SpliceRelay
        if isinstance(upstream, Stream):
            timeout_s = self.half_closed_timeout_s
            relay = Relay(tunnel.leg, upstream, tunnel.finished, half_closed_timeout_s=timeout_s)
        else:
            relay = upstream
        tunnel.relay = relay
        relay.start()
        self._clock.watch(relay, tunnel.lifetime_s)

    def _contain(self, tunnel: Tunnel, step: Callable[..., None], *arguments: object) -> None:
        """A fault of ours costs one tunnel, not whoever called us back."""
        if not contained(tunnel.name, step, *arguments) and tunnel in self.open:
            self.end(tunnel, _fault())

    def client_gone(self, tunnel: Tunnel) -> None:
        """The client broke off (RST) before its tunnel stood: nobody is left to open it for. A client that
        has only ended its sending (FIN) is not gone: it may well wait for what the far side has to say."""
        if tunnel in self.open and not tunnel.awaiting_answer:
            self._refuse(tunnel, ClientGoneError())
            self._give_up(tunnel)

    def _give_up(self, tunnel: Tunnel) -> None:
        """Opens it no more."""
        opening, tunnel.opening = tunnel.opening, None
        if tunnel.task is not None:
            tunnel.task.cancel()
        if opening is not None:
            opening.cancel()

    async def _open_forward(self, tunnel: Tunnel, target: Target, alpn: Iterable[str]) -> SpliceRelay:
        timeout_s = self.half_closed_timeout_s
        return await self._forward.open(tunnel.leg, target, alpn, tunnel.finished, timeout_s)

    async def _open_reverse(self, tunnel: Tunnel, target: Target) -> Stream:
        if self.reverse is None:
            raise DialError(f"reverse {target.host}: the port for it opens at the next start")
        trace = (b"traceparent", tunnel.traceparent)
        headers = tunnel_request.post("https", target.authority, target.path, None, [trace])
        try:
            stream = await self.reverse.open(target.host, headers, self._upstreams.response_timeout_s)
        except StatusError as error:
            tunnel.status = error.status
            raise
        tunnel.stream_id, tunnel.status = stream.id, HTTPStatus.OK
        tunnel.target = dataclasses.replace(target, dial=Address.parse(stream.connection.peer_name))
        return stream

    def _refuse(self, tunnel: Tunnel, error: HboneError) -> None:
        self.open.discard(tunnel)
        self._leave(tunnel)
        turn_away(tunnel.leg.release(), error.alert)
        self._metrics.refused(error.flag)
        if isinstance(error, LimitError):
            self._admission.refusals.add(error)
        self._access_log.refused(
            src_addr=tunnel.peer,
            sni=tunnel.sni,
            route=tunnel.route or None,
            dst_addr=str(tunnel.target.dial) if tunnel.target else None,
            origin=tunnel.target.url if tunnel.target and tunnel.target.kind != "forward" else None,
            status=tunnel.status,
            tunnel_target=(tunnel.target and tunnel.target.connect_target) or None,
            traceparent=tunnel.traceparent.decode() if tunnel.stream_id is not None else None,
            attempts=tunnel.attempts if tunnel.attempts > 1 else None,
            duration_s=self._loop.time() - tunnel.started,
            flags=error.flag,
            error=str(error),
        )
        self._changed()

    def finished(self, tunnel: Tunnel, relay: Relay | SpliceRelay) -> None:
        """It is over; its last bytes may still have to leave."""
        self._clock.forget(relay)
        self._count(tunnel)
        error = relay.error
        flag = Flag.NONE if error is None else error.flag
        if relay.broken_downstream:
            flag = Flag.DOWNSTREAM_RESET
        if tunnel.counts is not None:
            tunnel.counts.closed(flag)
        target = tunnel.target
        self._access_log.tunnel(
            src_addr=tunnel.peer,
            sni=tunnel.sni,
            route=tunnel.route,
            dst_addr=str(target.dial) if target else None,
            origin=target.url if target and target.kind != "forward" else None,
            stream=tunnel.stream_id,
            status=tunnel.status,
            tunnel_target=(target and target.connect_target) or None,
            traceparent=tunnel.traceparent.decode() if tunnel.stream_id is not None else None,
            attempts=tunnel.attempts if tunnel.attempts > 1 else None,
            bytes_sent=relay.sent_bytes,
            bytes_recv=relay.received_bytes,
            setup_s=tunnel.setup_s,
            duration_s=self._loop.time() - tunnel.started,
            flags=flag,
            error=str(error) if error else None,
        )
        tunnel.leg.when_lost(tunnel.client_left)

    def client_left(self, tunnel: Tunnel) -> None:
        """Nothing is left of it."""
        self.open.discard(tunnel)
        self._leave(tunnel)
        self._changed()

    def _leave(self, tunnel: Tunnel) -> None:
        self._admission.leave(tunnel.peer)
        if tunnel.on_route:
            self._admission.leave_route(tunnel.route)

    def _count(self, tunnel: Tunnel) -> None:
        relay, counts = tunnel.relay, tunnel.counts
        if relay is None or counts is None:
            return
        counts.sent_bytes += relay.sent_bytes - tunnel.counted_sent
        counts.received_bytes += relay.received_bytes - tunnel.counted_received
        tunnel.counted_sent, tunnel.counted_received = relay.sent_bytes, relay.received_bytes

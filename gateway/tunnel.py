"""The story of one connection through the gateway: from its ClientHello to its line in the access log.

name → route → stream to the target (`upstream.py`) → relay. Whatever goes wrong before the relay
stands is told to the client as a TLS alert; nothing the far side says but a 200's body ever reaches the
client. The hello stays with the downstream leg until then, so nothing is lost by waiting.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.admission import Admission
from gateway.forward import Forward
from gateway.hello import ClientGoneError, ClientLeg, turn_away
from gateway.reverse import OK, ReverseListener
from gateway.routes import RouteTable, Target
from gateway.upstream import Upstreams
from shared.errors import DOWNSTREAM_RESET, DialError, HboneError, LimitError, StatusError
from shared.net.address import Address
from shared.net.relay import HALF_CLOSED_TIMEOUT_S, Relay
from shared.net.splice import SpliceRelay
from shared.net.stream import Stream
from shared.net.tunnel_clock import TunnelClock
from shared.ops.access_log import AccessLog
from shared.ops.metrics import RouteCounts, TunnelMetrics
from shared.tasks import spawn
from shared.wire import istio_sni, request_context, tunnel_request
from shared.wire.client_hello import ClientHello


def _new_trace() -> bytes:
    return request_context.traceparent(os.urandom(request_context.TRACEPARENT_BYTES))


@dataclass(slots=True, eq=False)
class Tunnel:
    """What is known of one tunnel; the access log's line is made of it."""

    owner: Tunnels
    leg: ClientLeg
    peer: str
    sni: str
    started: float
    task: asyncio.Task[None] | None = None
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
    traceparent: bytes = field(default_factory=_new_trace)
    on_route: bool = False
    """Whether it is counted among its route's connections."""

    @property
    def buffered_bytes(self) -> int:
        """What is held for both its ends."""
        return self.leg.buffered_bytes if self.relay is None else self.relay.buffered_bytes

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
        half_closed_timeout_s: float = HALF_CLOSED_TIMEOUT_S,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.routes = routes
        self.reverse: ReverseListener | None = None
        """Where the workloads of `reverse` routes register."""
        self.half_closed_timeout_s = half_closed_timeout_s
        """Of tunnels that open from now on."""
        self.open: set[Tunnel] = set()
        """Every connection from its hello until it is gone, with all that was written to it."""
        self._upstreams = upstreams
        self._forward = forward
        self._access_log = access_log
        self._metrics = metrics
        self._admission = admission
        self._clock = clock
        self._changed = changed

    def take(self, leg: ClientLeg, hello: ClientHello, started: float) -> None:
        """Carries the connection of `leg`, admitted at the loop's time `started`, to its end."""
        tunnel = Tunnel(self, leg, leg.peer_name, hello.server_name or "", started)
        self.open.add(tunnel)
        tunnel.task = spawn(self._carry(tunnel, hello), name=f"tunnel {tunnel.peer}")
        leg.when_lost(lambda: self._client_gone(tunnel))

    def abort_all(self, error: HboneError) -> None:
        """Ends all tunnels as broken off; those that are being opened are refused."""
        for tunnel in list(self.open):
            self.end(tunnel, error)

    def end(self, tunnel: Tunnel, error: HboneError) -> None:
        """Ends one as broken off, or refuses it; what is left of one that is over is dropped."""
        if tunnel.relay is None:
            self._refuse(tunnel, error)
            if tunnel.task is not None:
                tunnel.task.cancel()
        else:
            tunnel.relay.abort(error)
            tunnel.leg.abort()  # if the tunnel is over, and its last bytes are leaving

    def count_bytes(self) -> None:
        """Brings the byte counters up to date with the tunnels that are still open."""
        for tunnel in self.open:
            self._count(tunnel)

    async def _carry(self, tunnel: Tunnel, hello: ClientHello) -> None:
        def finished(relay: Relay | SpliceRelay) -> None:
            self._finished(tunnel, relay)

        relay: Relay | SpliceRelay
        try:
            destination = istio_sni.parse(tunnel.sni)
            target = self.routes.match(destination)
            tunnel.target = target
            route = self.routes.routes[target.route]
            tunnel.route = route.host
            self._admission.enter_route(route)
            tunnel.on_route = True
            if target.kind == "forward":
                relay = await self._forward.open(
                    tunnel.leg, target, hello.alpn, finished, self.half_closed_timeout_s
                )
            elif target.kind == "reverse":
                relay = self._relay(tunnel.leg, await self._open_reverse(tunnel, target), finished)
            else:
                relay = self._relay(tunnel.leg, await self._upstreams.open(tunnel, target), finished)
        except HboneError as error:
            self._refuse(tunnel, ClientGoneError() if tunnel.gone else error)
            return
        except BaseException:
            if (
                tunnel in self.open
            ):  # not by abort_all, so it is a fault of ours, which the task's end reports
                self._refuse(tunnel, HboneError("a fault in the gateway: its log says more"))
            raise
        loop = asyncio.get_running_loop()
        tunnel.setup_s = loop.time() - tunnel.started
        self._metrics.tunnel_setup(tunnel.setup_s)
        counts = tunnel.counts = self._metrics.route(tunnel.route)
        counts.opened()
        tunnel.task = None  # an open tunnel has none
        tunnel.leg.when_lost(None)
        tunnel.relay = relay
        relay.start()
        self._clock.watch(relay, route.lifetime_s(self._clock.lifetime_s))

    def _relay(self, leg: ClientLeg, upstream: Stream, finished: Callable[[Relay], None]) -> Relay:
        return Relay(leg, upstream, finished, half_closed_timeout_s=self.half_closed_timeout_s)

    def _client_gone(self, tunnel: Tunnel) -> None:
        """The client broke off (RST) before its tunnel stood: nobody is left to open it for. A client that
        has only ended its sending (FIN) is not gone: it may well wait for what the far side has to say."""
        if tunnel.task is not None and tunnel in self.open and not tunnel.awaiting_answer:
            self._refuse(tunnel, ClientGoneError())
            tunnel.task.cancel()

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
        tunnel.stream_id, tunnel.status = stream.id, OK
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
            duration_s=asyncio.get_running_loop().time() - tunnel.started,
            flags=error.flag,
            error=str(error),
        )
        self._changed()

    def _finished(self, tunnel: Tunnel, relay: Relay | SpliceRelay) -> None:
        self._clock.forget(relay)
        self._count(tunnel)
        error = relay.error
        flag = "-" if error is None else error.flag
        if relay.broken_downstream:
            flag = DOWNSTREAM_RESET
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
            duration_s=asyncio.get_running_loop().time() - tunnel.started,
            flags=flag,
            error=str(error) if error else None,
        )
        tunnel.leg.when_lost(lambda: self._gone(tunnel))

    def _gone(self, tunnel: Tunnel) -> None:
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

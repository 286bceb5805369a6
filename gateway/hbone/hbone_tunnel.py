"""A tunnel of the HBONE port, from its request to its line in the access log.

1. A request is answered as ztunnel answers: 400 for what is no target or a forbidden one, 401 where the rules
   refuse, 503 where the target cannot be connected, a token cannot be checked or there are too many tunnels,
   else 200 once the target is connected. A method other than CONNECT gets 405, for which ztunnel has 400.
2. A name is looked up only if the rules may allow it, as it is written, without a search list, in a slot of
   its identity's. Only those of its addresses are dialled that the rules allow.
3. If a rule asks for a token and the one that is shown is not good enough, that is a 401 like any refusal,
   and has a `www-authenticate`. 407 is a proxy's, and clients of the mesh do not know it; after 401 ours
   ask again, with a newer token.
4. A host name that a route with `inner` takes is never looked up. The rules judge it by its name; then the
   route's tunnel is opened as one of a client by SNI is, and its 200 is ours. What goes wrong there is a 503.
   An address (the VIP of a Service) leads there, too, if the cluster's list has its name, or else the
   request's `forwarded`, which gives a peer nothing: it may as well ask for the name.
5. The bytes of such a tunnel are TLS, so a peer that lets go of its stream has ended (`Relay`, rule 6). A
   peer that leaves while the service has yet to answer keeps its place until then (`opening`, rule 4).
6. With `inner: none` they are plain. We speak the mesh's TLS inside of the route's tunnel (`inner_tls`), and
   say 200 once its handshake is complete. The service is told who the peer is, by our word.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from gateway.config.hbone_settings import HboneSettings
from gateway.config.limit_settings import Limits
from gateway.hbone.hbone_tokens import HboneTokens, KeysAwaitedError
from gateway.ports.admission import HBONE_PER_IDENTITY, HBONE_TUNNELS, Counts, Refusals, memory_full
from gateway.rules.claims import Token
from gateway.rules.hbone_rules import Rules, address_of
from gateway.rules.routes import Route, connect_name
from gateway.sni.tunnel import FIRST_FLIGHT_BYTES, Tunnels
from gateway.sni.upstream import ServiceUpstream
from shared.address import Address
from shared.address_forms import is_stand_in
from shared.errors import (
    BadRequestError,
    DeniedError,
    DialError,
    Flag,
    HboneError,
    LimitError,
    StatusError,
    StreamResetError,
    TokenNeededError,
)
from shared.http2.events import Headers
from shared.net.dial import reason
from shared.net.legs.contract import Leg
from shared.net.legs.stream import Stream, header_value
from shared.net.legs.tcp import TcpLeg
from shared.net.names.endpoint import Endpoint
from shared.net.names.happy_eyeballs import connect
from shared.net.names.names import resolve
from shared.net.relay.tunnel_clock import TunnelClock
from shared.net.tls.mesh_tls import MeshIdentity
from shared.net.tls.revocation_watch import Counted
from shared.ops.access_log import AccessLog
from shared.ops.metrics import RouteCounts, TunnelMetrics
from shared.tasks import report
from shared.trust.spiffe import SpiffeId
from shared.tunnel.connect_target import read_authority
from shared.tunnel.opening import Opening
from shared.tunnel.request_context import (
    CLIENT_CERTIFICATE,
    client_certificate,
    forwarded,
    forwarded_for,
    forwarded_host,
    read_traceparent,
)
from shared.tunnel.tunnel_record import TunnelRecord
from shared.tunnel.tunnel_request import NO_TARGET
from shared.tunnel.tunnel_server import GONE, ServedTunnel

if TYPE_CHECKING:
    from gateway.hbone.inner_tls import InnerConnection, InnerTls, InnerTlsOfRoutes

TOO_OLD = "inner: hbone needs a newer krun there, one that has target 15008"

ROUTE = "hbone"
"""What these tunnels have where others have their route: in the metrics, the access log, the admin port."""


class HboneTunnels:
    """The port's tunnels, and what they share."""

    def __init__(
        self,
        settings: HboneSettings,
        access_log: AccessLog,
        metrics: TunnelMetrics,
        *,
        limits: Limits,
        refusals: Refusals,
        is_full: Callable[[], bool],
        share: Callable[[int], int],
        by_route: Tunnels | None = None,
        name_of: Callable[[str], str | None] = lambda _: None,
        over: Callable[[], None] = lambda: None,
        own_name: Callable[[], str] = lambda: "",
    ) -> None:
        """The time to connect, of `limits`, is a target's, for the look-up of its name and TCP, or for TLS
        inside of a route's tunnel. `refusals` counts what each limit refused, of which `is_full` is one: no
        memory for buffers. `share` is this process's part of a limit. `by_route` has the routes, and what
        opens their tunnels; `name_of` tells the Service's name of an address; `over` is called when a tunnel
        is. `own_name` tells our SPIFFE ID, empty if nobody knows it."""
        self.open: set[HboneTunnel] = set()
        """Those that are being connected included."""
        self.identities = Counts()
        self.rules = Rules(settings.rules, settings.trust)
        self.tokens = HboneTokens(settings.jwt)
        self.settings = settings
        self.use_limits(limits)
        self.clock = TunnelClock(settings.idle_timeout_s, settings.max_tunnel_lifetime_s)
        self.access_log = access_log
        self.metrics = metrics
        self.counts = metrics.route(ROUTE)
        self.refusals = refusals
        self.share = share
        self.is_full = is_full
        self.over = over
        self.by_route = by_route
        self.name_of = name_of
        self.own_name = own_name
        self._inner_tls: InnerTlsOfRoutes | None = None  # most have none, and no OpenSSL of this kind

    def use_limits(self, limits: Limits) -> None:
        """Goes by `limits` for tunnels that open from now on."""
        self.connect_timeout_s = limits.connect_timeout_s
        self.half_closed_timeout_s = limits.half_closed_timeout_s

    def apply(self, settings: HboneSettings) -> None:
        """From now on goes by the rules and limits of `settings`, whose other fields are as before."""
        self.rules = Rules(settings.rules, settings.trust)
        self.tokens.use(settings.jwt)
        self.tokens.start()
        self.settings = settings
        self.clock.idle_s = settings.idle_timeout_s
        self.clock.lifetime_s = settings.max_tunnel_lifetime_s
        if self._inner_tls is not None and self.by_route is not None:
            routes = self.by_route.routes.routes
            self._inner_tls.keep_only(
                route.inner_identity for route in routes if route.inner_identity is not None
            )

    def inner_tls(self, identity: MeshIdentity) -> InnerTls:
        """What tunnels of this identity have inside. Raises DialError if its files cannot be used."""
        if self._inner_tls is None:
            from gateway.hbone.inner_tls import InnerTlsOfRoutes

            self._inner_tls = InnerTlsOfRoutes()
        return self._inner_tls.of(identity)

    def inner_revocations(self) -> Iterable[Counted]:
        """The lists that the far sides of TLS inside of tunnels are held against."""
        return () if self._inner_tls is None else self._inner_tls.revocations()

    def close(self) -> None:
        """Looks after open tunnels no more, and follows no files."""
        self.tokens.close()
        self.clock.close()
        if self._inner_tls is not None:
            self._inner_tls.close()

    @property
    def most(self) -> int:
        """How many there may be."""
        return self.share(self.settings.max_tunnels)

    def check_room(self, identity: str) -> None:
        """Raises LimitError if there is none for a tunnel of `identity`, which is counted already."""
        if len(self.open) > self.most:
            raise LimitError(f"{self.most} tunnels are open, which is max_tunnels", HBONE_TUNNELS)
        if self.is_full():
            raise memory_full()
        most = self.share(self.settings.max_tunnels_per_identity or self.settings.max_tunnels)
        if self.identities[identity] > most:
            text = f"{most} tunnels of {identity} are open, which is max_tunnels_per_identity"
            raise LimitError(text, HBONE_PER_IDENTITY)


class HboneTunnel(ServedTunnel):
    """A tunnel of the member `identity` of the mesh."""

    __slots__ = (
        "_counted_received",
        "_counted_sent",
        "_counts",
        "_gone_error",
        "_identity",
        "_inner",
        "_opening",
        "_route",
        "_traceparent",
        "_tunnels",
    )

    def __init__(
        self, tunnels: HboneTunnels, stream: Stream, record: TunnelRecord, identity: SpiffeId
    ) -> None:
        super().__init__(
            stream,
            record,
            lambda tunnel: cast("HboneTunnel", tunnel)._finish(),
            tunnels.clock,
            half_closed_timeout_s=tunnels.half_closed_timeout_s,
        )
        self._tunnels = tunnels
        self._identity = identity
        self._counts: RouteCounts = tunnels.counts
        self._route: Route | None = None  # that takes it, and counts it among its connections
        self._opening: Opening | None = None
        self._inner: InnerConnection | None = None  # the TLS that we speak inside of the route's tunnel
        # The peer has left, and the service has yet to answer.
        self._gone_error: StreamResetError | None = None
        self._traceparent = b""  # that we have made up
        self._counted_sent = 0
        self._counted_received = 0
        tunnels.open.add(self)
        tunnels.identities.add(record.identity)

    @property
    def buffered_bytes(self) -> int:
        """What is held for both its ends."""
        held = self.stream.buffered_bytes if self.relay is None else self.relay.buffered_bytes
        return held if self._inner is None else held + self._inner.buffered_bytes

    # 1. What it asks for, and whether it may.

    def begin(self, authority: bytes) -> None:
        """Connects the target that its request asks for with `authority`, or refuses it."""
        tunnels, headers = self._tunnels, self.stream.headers
        if header_value(headers, b":method") != b"CONNECT":
            error = BadRequestError("a tunnel is opened with CONNECT")
            self.refuse(HTTPStatus.METHOD_NOT_ALLOWED, error, [(b"allow", b"CONNECT")])
            return
        token = tunnels.tokens.shown(headers)
        try:
            if header_value(headers, b":protocol"):
                raise BadRequestError("a tunnel is opened with plain CONNECT, not with RFC 8441's")
            target = self.record.target = read_authority(authority)
            name = self._taken_name(target)
            with suppress(KeysAwaitedError):  # whoever connects waits for them, and asks again
                self._judge(target, name, token)
            tunnels.check_room(self.record.identity)
        except BadRequestError as error:
            self.refuse(HTTPStatus.BAD_REQUEST, error)
        except DeniedError as error:
            self.refuse(HTTPStatus.UNAUTHORIZED, error)
        except LimitError as error:
            tunnels.refusals.add(error)
            self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, error)
        else:
            if name is None:
                self.carry(partial(self._connect, target, token), f"hbone tunnel to {target}")
            elif token.is_awaited:
                self.carry(partial(self._await_keys, target, name, token), f"hbone tunnel to {target}")
            else:
                self._take_route(name)

    def _taken_name(self, target: Address) -> Address | None:
        """The name by which a route takes the tunnel, and its port; None: `target` is connected."""
        tunnels = self._tunnels
        by_route = tunnels.by_route
        if by_route is None:
            return None
        name = connect_name(target)
        if (address := address_of(target.host)) is not None:
            told = header_value(self.stream.headers, b"forwarded")
            host = tunnels.name_of(str(address)) or forwarded_host(told)
            if host is None:
                return None
            name = Address(host, target.port)
        return name if by_route.routes.takes_connect(name.host) else None

    def _judge(self, target: Address, name: Address | None, token: Token) -> None:
        """Raises DeniedError if the rules refuse it, or KeysAwaitedError."""
        rules = self._tunnels.rules
        if name is not None:
            rules.check_name(self._identity, name, address_of(target.host), token)
        else:
            rules.check_request(self._identity, target, token)

    def refuse(self, status: int, error: HboneError, extra: Headers = ()) -> None:
        if self._gone_error is not None:  # there is nobody to tell
            if not self.over:
                self._fail(GONE, self._gone_error)
            return
        if isinstance(error, TokenNeededError):
            extra = [*extra, (b"www-authenticate", error.challenge)]
        super().refuse(status, error, extra)

    # 2. Its target is connected.

    async def _connect(self, target: Address, token: Token) -> Leg:
        """Raises DialError, LimitError if there are too many look-ups for its identity, or DeniedError where
        the rules refuse what the target's name stands for, or the token once its issuer's keys are there."""
        while True:
            if token.is_awaited:
                await token.prepare()
                self._tunnels.rules.check_request(self._identity, target, token)
            with suppress(KeysAwaitedError):  # of a rule about what the name stands for
                return await self._dial(target, token)

    async def _dial(self, target: Address, token: Token) -> Leg:
        tunnels, record = self._tunnels, self.record
        timeout_s = tunnels.connect_timeout_s
        found: list[Endpoint] = []
        if (address := address_of(target.host)) is not None and is_stand_in(address):
            raise DialError(
                f"connect to {target}: the client's mesh has made this address up for a name, and hgate does "
                "not know which: no Service here has it, and forwarded names none that a route takes"
            )
        try:
            async with asyncio.timeout(timeout_s):
                # As the client wrote it: with a search list it could stand for a name that a rule denies.
                found = await resolve(target.absolute, record.identity)
                sock = await connect(self._allowed(target, found, token))
                try:
                    record.target = Address(*sock.getpeername()[:2])
                    _, leg = await asyncio.get_running_loop().create_connection(TcpLeg, sock=sock)
                except BaseException:
                    sock.close()
                    raise
        except LimitError as error:
            tunnels.refusals.add(error)
            raise
        except TimeoutError as error:
            what = "no answer" if found else "its name was not looked up"
            raise DialError(f"connect to {target}: {what} within {timeout_s:g} s") from error
        except OSError as error:
            raise DialError(f"connect to {target}: {reason(error)}") from error
        return leg

    def _allowed(self, target: Address, endpoints: list[Endpoint], token: Token) -> list[Endpoint]:
        """Those of `endpoints` that the rules allow. Raises DeniedError if it is none, or
        KeysAwaitedError."""
        allowed: list[Endpoint] = []
        refusal = DeniedError(f"{target} has no address")
        for endpoint in endpoints:
            address = ipaddress.ip_address(endpoint[1][0].partition("%")[0])
            try:
                self._tunnels.rules.check(self._identity, target, address, token)
                allowed.append(endpoint)
            except DeniedError as error:
                refusal = error
        if not allowed:
            raise refusal
        return allowed

    # 2b. Or a route takes it, and its service is asked for a tunnel.

    async def _await_keys(self, target: Address, name: Address, token: Token) -> Leg:
        """Raises DialError if the issuer's keys cannot be had, DeniedError where the rules refuse the token,
        and what the route's tunnel raises."""
        await token.prepare()
        self._judge(target, name, token)
        try:
            self._enter_route(name)
        except LimitError as error:
            self._tunnels.refusals.add(error)
            raise
        return await self._ask()

    def _take_route(self, name: Address) -> None:
        try:
            opening = self._enter_route(name)
            waits = not opening.begin(self._answered, self._interrupted)
        except LimitError as error:
            self._tunnels.refusals.add(error)
            self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, error)
        except HboneError as error:
            self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, error)
        except Exception as error:
            self._fault(error)
        else:
            if waits:
                self._interrupted()

    def _enter_route(self, name: Address) -> Opening:
        """Raises NoRouteError if the route cannot take `name`, LimitError if it has too many connections,
        TokenError if nobody can have its token."""
        tunnels, record = self._tunnels, self.record
        by_route = tunnels.by_route
        assert by_route is not None
        target = by_route.routes.find_connect(name)
        route = by_route.routes.routes[target.route]
        request = by_route.upstreams.request_of(target)
        record.route, record.origin, record.target = route.name, request.url, request.address
        by_route.admission.enter_route(route)
        by_route.admission.opening.add(route.name)
        self._route = route
        self._counts = tunnels.metrics.route(route.name)
        if by_route.times_phases:
            record.phases = []
        told = read_traceparent(header_value(self.stream.headers, b"traceparent"))
        if told is None:
            self._traceparent = next(by_route.traceparents)
        traceparent = self._traceparent if told is None else told.encode()
        at_once = route.first_flight == "with_request"
        first_flight = b""
        if target.inner_identity is not None:
            self._inner = self._make_inner(target.inner_identity, target.inner_sni)
            first_flight = self._inner.hello() if at_once else b""
        elif at_once:
            first_flight = self.stream.first(FIRST_FLIGHT_BYTES)
        opening = self._opening = Opening(
            ServiceUpstream(by_route.upstreams, request, record, traceparent, self._about_peer()),
            by_route.upstreams.response_timeout_s,
            by_route.upstreams.rules,
            budget=request.budget,
            deadlines=by_route.deadlines,
            first_flight=first_flight,
            cold_start_s=target.cold_start_s,
        )
        return opening

    def _make_inner(self, identity: MeshIdentity, server_name: str) -> InnerConnection:
        """Raises DialError if our certificates cannot be used."""
        from gateway.hbone.inner_tls import InnerConnection

        tunnels = self._tunnels
        return InnerConnection(
            tunnels.inner_tls(identity),
            server_name,
            self,
            handshake_timeout_s=tunnels.connect_timeout_s,
            half_closed_timeout_s=tunnels.half_closed_timeout_s,
        )

    def _about_peer(self) -> Headers:
        """What the request says of the peer, which cannot show its certificate to the service itself."""
        if self._inner is None:
            return ()
        own = self._tunnels.own_name()
        return (
            (b"forwarded", forwarded(self.record.peer)),
            (CLIENT_CERTIFICATE, client_certificate(own, self._identity)),
        )

    def _interrupted(self) -> None:
        self.carry(self._ask, f"hbone tunnel to {self.record.name}")

    async def _ask(self) -> Leg:
        assert self._opening is not None
        try:
            return await self._opening.run()
        except LimitError as error:
            self._tunnels.refusals.add(error)
            raise
        except StatusError as error:
            is_inner = self._route is not None and self._route.inner == "hbone"
            if not is_inner or f": {NO_TARGET}" not in str(error):
                raise
            raise StatusError(error.status, f"{error}: {TOO_OLD}") from error

    def _answered(self, upstream: Stream) -> None:
        try:
            self._open(upstream)
        except Exception as error:
            self._fault(error)

    def _fault(self, error: Exception) -> None:
        """A fault of ours costs one tunnel, not whoever called us back."""
        report(f"hbone tunnel to {self.record.name}", error)
        self.abort(HboneError("a fault of ours: its log says more"))

    def _gone(self, error: StreamResetError) -> None:
        if self._opening is None or self._opening.abandon():
            super()._gone(error)
        else:
            self._gone_error = error

    # 3. It carries.

    def _open(self, leg: Leg) -> None:
        if self._gone_error is not None:
            leg.abort()
            self._fail(GONE, self._gone_error)
        elif self._inner is not None:
            self._inner.begin(cast("Stream", leg))
        else:
            self._carry_to(leg)

    def inner_established(self, leg: Leg) -> None:
        """The TLS inside of the tunnel is there."""
        try:
            self._carry_to(leg)
        except Exception as error:
            self._fault(error)

    def inner_failed(self, error: HboneError) -> None:
        """There is none, and the far side knows it."""
        self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, error)

    def _carry_to(self, leg: Leg) -> None:
        tunnels, record, route = self._tunnels, self.record, self._route
        record.setup_s = self.age_s
        tunnels.metrics.tunnel_setup(record.setup_s)
        self._counts.opened()
        if route is None:
            self._relay(leg)
            return
        assert self._opening is not None and tunnels.by_route is not None
        tunnels.by_route.admission.opening.drop(route.name)
        is_tls = self._inner is None
        self._relay(
            leg,
            sent_bytes=len(self._opening.first_flight) if is_tls else 0,
            tls_inside=is_tls,
            lifetime_s=route.lifetime_s(tunnels.by_route.clock.lifetime_s),
        )

    @property
    def outlives_its_connection(self) -> bool:
        """The peer has let go of it and has gone, and the service has yet to take all that came."""
        return self.relay is not None and self.stream.connection.lost

    def count_bytes(self) -> None:
        """Adds what has passed since the last call to the metrics."""
        if self.relay is not None:
            self._count(self.relay.sent_bytes, self.relay.received_bytes)

    def _count(self, sent: int, received: int) -> None:
        counts = self._counts
        counts.sent_bytes += sent - self._counted_sent
        counts.received_bytes += received - self._counted_received
        self._counted_sent, self._counted_received = sent, received

    # 4. Its end.

    def abort(self, error: HboneError) -> None:
        """Ends it at once as broken off; or refuses it while it connects, and ends what connects it."""
        connecting = self._connecting
        super().abort(error)
        if connecting is not None:
            connecting.cancel()  # else it would go on asking, and be counted nowhere

    def stop(self, error: HboneError) -> asyncio.Task[None] | None:
        """The same; the task that has connected it, if there is one."""
        task = self._connecting
        self.abort(error)
        return task

    def _finish(self) -> None:
        tunnels, record, opening = self._tunnels, self.record, self._opening
        tunnels.open.discard(self)
        tunnels.identities.drop(record.identity)
        if opening is not None:
            record.attempts = opening.attempts
            opening.cancel()  # nothing if it is over
            self._opening = None
        inner, self._inner = self._inner, None
        if inner is not None:
            self._let_go_of(inner)
        if self._route is not None and tunnels.by_route is not None:
            tunnels.by_route.admission.leave_route(self._route.name)
            if not record.opened:
                tunnels.by_route.admission.opening.drop(self._route.name)
        if self._traceparent:
            record.traceparent = self._traceparent.decode()
        if record.opened:
            self._count(record.sent_bytes or 0, record.received_bytes or 0)
            self._counts.closed(record.flag)
        else:
            tunnels.metrics.refused(record.flag)
        if record.error is not None:
            tunnels.refusals.recent.add(record)
        record.forwarded_for = forwarded_for(header_value(self.stream.headers, b"forwarded"))
        record.write(tunnels.access_log)
        tunnels.over()

    def _let_go_of(self, inner: InnerConnection) -> None:
        record, cause = self.record, inner.error
        if not record.opened:
            inner.abort()
        elif cause is not None and record.flag is Flag.UPSTREAM_RESET:
            record.error, record.flag = cause, cause.flag  # TLS knows only that it was cut off

    # What is known of it.

    def row(self) -> dict[str, Any]:
        """For the admin port's dump."""
        record, relay = self.record, self.relay
        return {
            "src.addr": record.peer,
            "identity": record.identity,
            "route": record.route,
            "tunnel.target": record.name,
            "dst.addr": str(record.target) if record.target else None,
            "stream": record.stream,
            "age_s": round(self.age_s, 3),
            "bytes_sent": relay.sent_bytes if relay else 0,
            "bytes_recv": relay.received_bytes if relay else 0,
        }

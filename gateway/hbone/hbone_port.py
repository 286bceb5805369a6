"""The HBONE port: members of the mesh open tunnels with CONNECT, over HTTP/2 over mTLS, as ztunnel does.

Owned here: the listener, what a request is answered, its line in the log, and the end of it all. Whose
connection it is has `mesh_connections.py` found out; whom the rules let where is `hbone_rules.py`'s, what can
be set `hbone_settings.py`'s, the tunnel itself `shared/tunnel/tunnel_server.py`'s.

The rules:

1. A request is answered as ztunnel answers: 400 for what is no target or a forbidden one, 401 where the rules
   say no, 503 where the target cannot be connected, a token cannot be checked or there are too many tunnels,
   else 200 once the target is connected. A method other than CONNECT gets 405, for which ztunnel has 400.
2. A name is looked up only if the rules may allow it, as it is written, without a search list, in a slot of
   its identity's (`shared/net/names/resolver.py`); only those of its addresses are dialled that the rules
   allow.
3. New tunnels get the rules as they are now; open ones stay.
4. A peer whose certificate has ended opens no tunnel; its requests are refused as if they had never come
   (REFUSED_STREAM), for it may have a new one. Its open tunnels have the drain timeout.
5. Where rules ask for a token and the one that is shown is not good enough, that is a 401 like any no of
   theirs, and has a `www-authenticate`. 407, which is a proxy's, is nothing that clients of the mesh know;
   after 401 ours ask again, with a newer token.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from gateway.config.hbone_settings import HboneSettings
from gateway.config.limit_settings import Limits
from gateway.hbone.hbone_tokens import HboneTokens, KeysAwaitedError
from gateway.ports.admission import (
    BUFFERED,
    HBONE_PER_IDENTITY,
    HBONE_TUNNELS,
    Counts,
    Refusals,
)
from gateway.ports.listeners import Key, Listeners
from gateway.ports.mesh_connections import MemberConnection, MeshConnections
from gateway.rules.claims import Token
from gateway.rules.hbone_rules import Rules, read_authority
from gateway.rules.templates import shown
from shared.address import Address
from shared.errors import (
    BadRequestError,
    DeniedError,
    DialError,
    EmptyConnectionError,
    HboneError,
    LimitError,
    StreamResetError,
    TokenNeededError,
)
from shared.http2.events import Headers
from shared.http2.frames import CANCEL
from shared.net.dial import reason
from shared.net.legs.contract import Leg
from shared.net.legs.stream import Stream, header_value
from shared.net.legs.tcp import TcpLeg
from shared.net.names.endpoint import Endpoint
from shared.net.names.happy_eyeballs import connect
from shared.net.names.names import resolve
from shared.net.relay.tunnel_clock import TunnelClock
from shared.net.tls.revocation_watch import RevocationWatch
from shared.ops import families
from shared.ops.access_log import AccessLog
from shared.ops.metrics import TunnelMetrics
from shared.trust.spiffe import SpiffeId
from shared.tunnel.request_context import forwarded_for
from shared.tunnel.tunnel_record import TunnelRecord
from shared.tunnel.tunnel_server import ServedTunnel

ROUTE = "hbone"
"""What these tunnels have where others have their route: in the metrics, the access log, the admin port."""


class HboneListener:
    """The port, its connections and their tunnels. `rules` may be replaced at any time (rule 3)."""

    def __init__(
        self,
        settings: HboneSettings,
        access_log: AccessLog,
        metrics: TunnelMetrics,
        *,
        limits: Limits,
        changed: Callable[[], None] = lambda: None,
        refusals: Refusals | None = None,
        is_full: Callable[[], bool] = lambda: False,
        siblings: int = 1,
        ports: Mapping[Key, Address] | None = None,
        share: Callable[[int], int] = lambda total: total,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Of `limits` the time to connect is a target's, for the look-up of its name and TCP, and the drain
        timeout is for the tunnels of a peer whose certificate has ended, by `wall_clock`. `changed` is called
        when the number of open connections may have changed; `refusals` counts who came up against a limit,
        of which `is_full` is one: no memory for buffers. `siblings` processes listen together, this one
        included, in place of port 0 on `ports`, and of their limits it has its `share`."""
        self.rules = Rules(settings.rules, settings.trust)
        self.tokens = HboneTokens(settings.jwt)
        self._settings = settings
        self._access_log = access_log
        self._metrics = metrics
        self._counts = metrics.route(ROUTE)
        self._refusals = refusals or Refusals()
        self._share = share
        self._is_full = is_full
        self._identities = Counts()
        self._clock = TunnelClock(settings.idle_timeout_s, settings.max_tunnel_lifetime_s)
        self._connections = MeshConnections(
            settings,
            share=share,
            is_full=is_full,
            make=lambda lost: MemberConnection(client=False, on_request=self._take, on_lost=lost),
            refused=self._refused,
            changed=changed,
            expel=self._expel,
            drain_timeout_s=limits.drain_timeout_s,
            wall_clock=wall_clock,
        )
        self.use_limits(limits)
        self._listeners = Listeners(
            self._connections.protocol, siblings=siblings, ports=ports, purpose="hbone"
        )
        self.tunnels: set[_Tunnel] = set()
        """Open, or being connected."""
        for gauge, read in (
            (families.LISTENER_CONNECTIONS, lambda: self.open_connections),
            (families.LISTENER_CONNECTIONS_LIMIT, lambda: self._connections.most),
            (families.LISTENER_TUNNELS, lambda: self.open_tunnels),
            (families.LISTENER_TUNNELS_LIMIT, lambda: self._most_tunnels),
        ):
            metrics.watch(gauge, read)
        metrics.add(self.tokens.families)

    # What the owner asks.

    @property
    def revocations(self) -> RevocationWatch | None:
        """The lists that peers are held against."""
        return self._connections.revocations

    @property
    def open_connections(self) -> int:
        """Connections that are open now, handshakes included."""
        return len(self._connections)

    @property
    def open_tunnels(self) -> int:
        """Tunnels that are open or being connected."""
        return len(self.tunnels)

    @property
    def buffered_bytes(self) -> int:
        """What waits on its connections to be sent; tunnels are asked themselves."""
        return self._connections.buffered_bytes

    @property
    def addresses(self) -> list[Address]:
        """Where it listens; tells the ports that were 0."""
        return self._listeners.bound

    def count_bytes(self) -> None:
        """Brings the byte counters up to date with the tunnels that are still open."""
        for tunnel in self.tunnels:
            if tunnel.relay is not None:
                self._count(tunnel, tunnel.relay.sent_bytes, tunnel.relay.received_bytes)

    def rows(self) -> list[dict[str, Any]]:
        """The tunnels for the admin port's dump."""
        return [
            {
                "src.addr": tunnel.record.peer,
                "identity": tunnel.record.identity,
                "route": ROUTE,
                "tunnel.target": tunnel.record.name,
                "dst.addr": str(tunnel.record.target) if tunnel.record.target else None,
                "stream": tunnel.record.stream,
                "age_s": round(tunnel.age_s, 3),
                "bytes_sent": tunnel.relay.sent_bytes if tunnel.relay else 0,
                "bytes_recv": tunnel.relay.received_bytes if tunnel.relay else 0,
            }
            for tunnel in self.tunnels
        ]

    # Start and end.

    def use_limits(self, limits: Limits) -> None:
        """Goes by `limits` for tunnels that open, and certificates that end, from now on."""
        self._connect_timeout_s = limits.connect_timeout_s
        self._half_closed_timeout_s = limits.half_closed_timeout_s
        self._connections.drain_timeout_s = limits.drain_timeout_s

    def apply(self, settings: HboneSettings) -> None:
        """From now on goes by the rules and limits of `settings`, whose other fields are as before."""
        self.rules = Rules(settings.rules, settings.trust)
        self.tokens.use(settings.jwt)
        self.tokens.start()
        self._settings = self._connections.settings = settings
        self._clock.idle_s = settings.idle_timeout_s
        self._clock.lifetime_s = settings.max_tunnel_lifetime_s

    async def start(self) -> None:
        """Reads the certificates and listens.

        Raises:
            UnavailableError: a file is missing, or an address cannot be had.
            ConfigError: a file has not what it should.
        """
        self._connections.read_certificates()
        self.tokens.start()
        await self._listeners.open(self._settings.listen)

    async def drain(self) -> None:
        """Takes no new connection and no new tunnel; each connection closes when its last tunnel is over."""
        await self._listeners.close()
        self._connections.drain()

    async def close(self, error: HboneError | None = None) -> None:
        """Ends everything at once; `error` says why in the tunnels' log lines."""
        error = error or StreamResetError("the gateway stops", CANCEL)
        self._listeners.abort()
        connecting = [tunnel.connecting for tunnel in self.tunnels if tunnel.connecting is not None]
        for tunnel in list(self.tunnels):
            tunnel.abort(error)
        for task in connecting:
            task.cancel()
        self.tokens.close()
        self._clock.close()
        await self._connections.close(str(error))
        await asyncio.gather(*connecting, return_exceptions=True)

    # One tunnel, from its request to its line in the log.

    def _take(self, stream: Stream) -> None:
        member = cast("MemberConnection", stream.connection)
        if member.identity is None:  # it has been told GOAWAY
            stream.abort()
            return
        authority = header_value(stream.headers, b":authority")
        if member.expiry is not None and not member.expiry.allows_stream():
            self._refuse_expired(stream, member, shown(authority.decode("latin-1")))
            return
        record = TunnelRecord(
            peer=member.peer_name,
            route=ROUTE,
            identity=str(member.identity),
            name=shown(authority.decode("latin-1")),
            stream=stream.id,
        )
        tunnel = _Tunnel(
            stream,
            record,
            member.identity,
            self._over,
            self._clock,
            half_closed_timeout_s=self._half_closed_timeout_s,
        )
        self.tunnels.add(tunnel)
        self._identities.add(record.identity)
        if header_value(stream.headers, b":method") != b"CONNECT":
            error = BadRequestError("a tunnel is opened with CONNECT")
            tunnel.refuse(HTTPStatus.METHOD_NOT_ALLOWED, error, [(b"allow", b"CONNECT")])
            return
        token = self.tokens.shown(stream.headers)
        try:
            target = self._target(tunnel, authority, token)
        except BadRequestError as error:
            tunnel.refuse(HTTPStatus.BAD_REQUEST, error)
        except DeniedError as error:
            tunnel.refuse(HTTPStatus.UNAUTHORIZED, error)
        except LimitError as error:
            self._refusals.add(error)
            tunnel.refuse(HTTPStatus.SERVICE_UNAVAILABLE, error)
        else:
            connecting = partial(self._connect, tunnel, target, token)
            tunnel.connecting = tunnel.carry(connecting, f"hbone tunnel to {target}")

    def _refuse_expired(self, stream: Stream, member: MemberConnection, name: str) -> None:
        """The peer may have a newer certificate by now, and ask again on a connection with that."""
        assert member.expiry is not None and member.expiry.error is not None
        error = member.expiry.error
        stream.refuse()
        self._metrics.refused(error.flag)
        record = TunnelRecord(
            peer=member.peer_name, route=ROUTE, identity=str(member.identity), name=name, stream=stream.id
        )
        record.fail(error)
        record.write(self._access_log)

    def _target(self, tunnel: _Tunnel, authority: bytes, token: Token) -> Address:
        """Raises BadRequestError, DeniedError or LimitError."""
        if header_value(tunnel.stream.headers, b":protocol"):
            raise BadRequestError("a tunnel is opened with plain CONNECT, not with RFC 8441's")
        target = tunnel.record.target = read_authority(authority)
        with suppress(KeysAwaitedError):  # `_connect` waits for them, and asks again
            self.rules.check_request(tunnel.identity, target, token)
        self._check_room(tunnel)
        return target

    @property
    def _most_tunnels(self) -> int:
        return self._share(self._settings.max_tunnels)

    def _check_room(self, tunnel: _Tunnel) -> None:
        """Raises LimitError if there is none for `tunnel`, which is counted already."""
        if len(self.tunnels) > self._most_tunnels:
            raise LimitError(f"{self._most_tunnels} tunnels are open, which is max_tunnels", HBONE_TUNNELS)
        if self._is_full():
            raise LimitError(f"open tunnels hold as many bytes as {BUFFERED} allows", BUFFERED)
        settings, identity = self._settings, tunnel.record.identity
        most = self._share(settings.max_tunnels_per_identity or settings.max_tunnels)
        if self._identities[identity] > most:
            text = f"{most} tunnels of {identity} are open, which is max_tunnels_per_identity"
            raise LimitError(text, HBONE_PER_IDENTITY)

    async def _connect(self, tunnel: _Tunnel, target: Address, token: Token) -> Leg:
        """Raises DialError, LimitError if there are too many look-ups for its identity, or DeniedError where
        the rules refuse what the target's name stands for, or the token once its issuer's keys are there."""
        while True:
            if token.is_awaited:
                await token.prepare()
                self.rules.check_request(tunnel.identity, target, token)
            with suppress(KeysAwaitedError):  # of a rule about what the name stands for
                return await self._dial(tunnel, target, token)

    async def _dial(self, tunnel: _Tunnel, target: Address, token: Token) -> Leg:
        loop = asyncio.get_running_loop()
        found: list[Endpoint] = []
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                # As the client wrote it: with a search list it could stand for a name that a rule denies.
                found = await resolve(target.absolute, str(tunnel.identity))
                sock = await connect(self._allowed(tunnel.identity, target, found, token))
                try:
                    tunnel.record.target = Address(*sock.getpeername()[:2])
                    _, leg = await loop.create_connection(TcpLeg, sock=sock)
                except BaseException:
                    sock.close()
                    raise
        except LimitError as error:
            self._refusals.add(error)
            raise
        except TimeoutError as error:
            what = "no answer" if found else "its name was not looked up"
            raise DialError(f"connect to {target}: {what} within {self._connect_timeout_s:g} s") from error
        except OSError as error:
            raise DialError(f"connect to {target}: {reason(error)}") from error
        tunnel.connecting = None
        tunnel.record.setup_s = tunnel.age_s
        self._metrics.tunnel_setup(tunnel.record.setup_s)
        self._counts.opened()
        return leg

    def _allowed(
        self, identity: SpiffeId, target: Address, endpoints: list[Endpoint], token: Token
    ) -> list[Endpoint]:
        """Those of `endpoints` that the rules allow. Raises DeniedError if it is none, or
        KeysAwaitedError."""
        allowed: list[Endpoint] = []
        refusal = DeniedError(f"{target} has no address")
        for endpoint in endpoints:
            address = ipaddress.ip_address(endpoint[1][0].partition("%")[0])
            try:
                self.rules.check(identity, target, address, token)
                allowed.append(endpoint)
            except DeniedError as error:
                refusal = error
        if not allowed:
            raise refusal
        return allowed

    def _over(self, tunnel: ServedTunnel) -> None:
        assert isinstance(tunnel, _Tunnel)
        record = tunnel.record
        self.tunnels.discard(tunnel)
        self._identities.drop(record.identity)
        if record.opened:
            self._count(tunnel, record.sent_bytes or 0, record.received_bytes or 0)
            self._counts.closed(record.flag)
        else:
            self._metrics.refused(record.flag)
        record.forwarded_for = forwarded_for(header_value(tunnel.stream.headers, b"forwarded"))
        record.write(self._access_log)

    def _expel(self, member: MemberConnection, error: DeniedError) -> None:
        """Ends a connection whose peer is not let in any more, with its tunnels."""
        for tunnel in list(self.tunnels):
            if tunnel.stream.connection is member:
                connecting = tunnel.connecting
                tunnel.abort(error)
                if connecting is not None:
                    connecting.cancel()
        member.expel(error)

    def _refused(self, peer: str, duration_s: float, error: HboneError) -> None:
        """A connection came to nothing."""
        self._metrics.refused(error.flag)
        if isinstance(error, LimitError):
            self._refusals.add(error)
        if not isinstance(error, EmptyConnectionError):
            record = TunnelRecord(peer=peer, route=ROUTE)
            record.fail(error, duration_s)
            record.write(self._access_log)

    def _count(self, tunnel: _Tunnel, sent: int, received: int) -> None:
        self._counts.sent_bytes += sent - tunnel.counted_sent
        self._counts.received_bytes += received - tunnel.counted_received
        tunnel.counted_sent, tunnel.counted_received = sent, received


class _Tunnel(ServedTunnel):
    """A tunnel of a member of the mesh."""

    __slots__ = ("connecting", "counted_received", "counted_sent", "identity")

    def __init__(
        self,
        stream: Stream,
        record: TunnelRecord,
        identity: SpiffeId,
        finished: Callable[[ServedTunnel], None],
        clock: TunnelClock,
        *,
        half_closed_timeout_s: float,
    ) -> None:
        super().__init__(stream, record, finished, clock, half_closed_timeout_s=half_closed_timeout_s)
        self.identity = identity
        self.connecting: asyncio.Task[None] | None = None
        self.counted_sent = 0
        self.counted_received = 0

    def refuse(self, status: int, error: HboneError, extra: Headers = ()) -> None:
        if isinstance(error, TokenNeededError):
            extra = [*extra, (b"www-authenticate", error.challenge)]
        super().refuse(status, error, extra)

"""A tunnel of the HBONE port, from its request to its line in the access log.

1. A request is answered as ztunnel answers: 400 for what is no target or a forbidden one, 401 where the rules
   refuse, 503 where the target cannot be connected, a token cannot be checked or there are too many tunnels,
   else 200 once the target is connected. A method other than CONNECT gets 405, for which ztunnel has 400.
2. A name is looked up only if the rules may allow it, as it is written, without a search list, in a slot of
   its identity's. Only those of its addresses are dialled that the rules allow.
3. If a rule asks for a token and the one that is shown is not good enough, that is a 401 like any refusal,
   and has a `www-authenticate`. 407 is a proxy's, and clients of the mesh do not know it; after 401 ours
   ask again, with a newer token.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from gateway.config.hbone_settings import HboneSettings
from gateway.config.limit_settings import Limits
from gateway.hbone.hbone_tokens import HboneTokens, KeysAwaitedError
from gateway.ports.admission import HBONE_PER_IDENTITY, HBONE_TUNNELS, Counts, Refusals, memory_full
from gateway.rules.claims import Token
from gateway.rules.hbone_rules import Rules
from shared.address import Address
from shared.errors import (
    BadRequestError,
    DeniedError,
    DialError,
    HboneError,
    LimitError,
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
from shared.ops.access_log import AccessLog
from shared.ops.metrics import TunnelMetrics
from shared.trust.spiffe import SpiffeId
from shared.tunnel.connect_target import read_authority
from shared.tunnel.request_context import forwarded_for
from shared.tunnel.tunnel_record import TunnelRecord
from shared.tunnel.tunnel_server import ServedTunnel

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
    ) -> None:
        """The time to connect, of `limits`, is a target's, for the look-up of its name and TCP. `refusals`
        counts what each limit refused, of which `is_full` is one: no memory for buffers. `share` is this
        process's part of a limit."""
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

    __slots__ = ("_counted_received", "_counted_sent", "_identity", "_tunnels")

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
        self._counted_sent = 0
        self._counted_received = 0
        tunnels.open.add(self)
        tunnels.identities.add(record.identity)

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
            with suppress(KeysAwaitedError):  # `_connect` waits for them, and asks again
                tunnels.rules.check_request(self._identity, target, token)
            tunnels.check_room(self.record.identity)
        except BadRequestError as error:
            self.refuse(HTTPStatus.BAD_REQUEST, error)
        except DeniedError as error:
            self.refuse(HTTPStatus.UNAUTHORIZED, error)
        except LimitError as error:
            tunnels.refusals.add(error)
            self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, error)
        else:
            self.carry(partial(self._connect, target, token), f"hbone tunnel to {target}")

    def refuse(self, status: int, error: HboneError, extra: Headers = ()) -> None:
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

    # 3. It carries.

    def _open(self, leg: Leg) -> None:
        tunnels, record = self._tunnels, self.record
        record.setup_s = self.age_s
        tunnels.metrics.tunnel_setup(record.setup_s)
        tunnels.counts.opened()
        super()._open(leg)

    def count_bytes(self) -> None:
        """Adds what has passed since the last call to the metrics."""
        if self.relay is not None:
            self._count(self.relay.sent_bytes, self.relay.received_bytes)

    def _count(self, sent: int, received: int) -> None:
        counts = self._tunnels.counts
        counts.sent_bytes += sent - self._counted_sent
        counts.received_bytes += received - self._counted_received
        self._counted_sent, self._counted_received = sent, received

    # 4. Its end.

    def stop(self, error: HboneError) -> asyncio.Task[None] | None:
        """Ends it at once, and whatever connects it: the task of that, if there is one."""
        task = self._connecting
        self.abort(error)
        if task is not None:
            task.cancel()
        return task

    def _finish(self) -> None:
        tunnels, record = self._tunnels, self.record
        tunnels.open.discard(self)
        tunnels.identities.drop(record.identity)
        if record.opened:
            self._count(record.sent_bytes or 0, record.received_bytes or 0)
            tunnels.counts.closed(record.flag)
        else:
            tunnels.metrics.refused(record.flag)
        if record.error is not None:
            tunnels.refusals.recent.add(record)
        record.forwarded_for = forwarded_for(header_value(self.stream.headers, b"forwarded"))
        record.write(tunnels.access_log)

    # What is known of it.

    def row(self) -> dict[str, Any]:
        """For the admin port's dump."""
        record, relay = self.record, self.relay
        return {
            "src.addr": record.peer,
            "identity": record.identity,
            "route": ROUTE,
            "tunnel.target": record.name,
            "dst.addr": str(record.target) if record.target else None,
            "stream": record.stream,
            "age_s": round(self.age_s, 3),
            "bytes_sent": relay.sent_bytes if relay else 0,
            "bytes_recv": relay.received_bytes if relay else 0,
        }

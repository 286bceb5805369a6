"""A workload's connection to the reverse port: from its handshake through its registration to its end.

1. The SNI is the name. One that no rule gives to anybody ends the handshake (unrecognized_name). After it the
   identity is known; if it may not have the name it is told so, then GOAWAY: TLS has no alert after the
   handshake that Python could send.
2. From here on we are the HTTP/2 client. A workload has its name from the moment in which it has answered our
   first request, so nobody is sent to a peer that does not serve.
3. It loses the name, but none of its tunnels, with GOAWAY from either end, when rules that have been changed
   refuse it, or when its certificate expires; then tunnels that are open have the drain timeout. When its
   certificate is revoked it loses them all at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Callable
from functools import partial
from typing import cast

from gateway.config.reverse_settings import ReverseSettings
from gateway.ports.admission import Refusals, report_refusal
from gateway.ports.member_connection import MemberConnection
from gateway.reverse.registry import Registration, Registry
from gateway.reverse.workload_connection import WorkloadConnection
from gateway.rules.reverse_rules import ReverseRules
from shared.address import check_host_name
from shared.errors import (
    DeniedError,
    HboneError,
    LeavingError,
    RefusedError,
    StreamResetError,
    UpstreamError,
)
from shared.http2.frames import CANCEL
from shared.net.http2.connection import Connection
from shared.net.http2.liveness import while_connected
from shared.net.tls.mesh_tls import ServerContext
from shared.ops.access_log import AccessLog
from shared.ops.metrics import TunnelMetrics
from shared.tasks import spawn
from shared.tunnel import registration
from shared.tunnel.registration import ALREADY_REGISTERED, REGISTERED, Verdict
from shared.tunnel.tunnel_record import TunnelRecord

log = logging.getLogger("hbone.gateway")

ROUTE = "reverse"
"""What the lines about these connections have as their route."""


class Registrations:
    """The workloads' connections, registered or about to be."""

    def __init__(
        self,
        settings: ReverseSettings,
        registry: Registry,
        access_log: AccessLog,
        metrics: TunnelMetrics,
        workers: int,
        refusals: Refusals,
    ) -> None:
        """`workers` processes share the port, this one included."""
        self.total = 0
        """Times that a name was registered."""
        self.over = asyncio.Event()
        """Set when the last connection has ended."""
        self._settings = settings
        self._registry = registry
        self._access_log = access_log
        self._workers = workers
        self._refusals = refusals
        self._report = partial(report_refusal, access_log=access_log, metrics=metrics, refusals=refusals)
        self._process = os.urandom(8).hex()
        self._rules = ReverseRules(settings.rules, settings.trust)
        self._members: set[WorkloadConnection] = set()
        self._leaving = False

    def __len__(self) -> int:
        return len(self._members)

    def apply(self, settings: ReverseSettings) -> None:
        """From now on goes by the rules of `settings`, for workloads that are registered already, too
        (rule 3)."""
        rules = self._rules = ReverseRules(settings.rules, settings.trust)
        for member in list(self._members):
            if member.registration is not None and member.identity is not None:
                try:
                    rules.check(member.identity, member.name)
                except RefusedError as error:
                    self.let_go(member, error)

    def leave(self) -> None:
        """Registers nobody any more, and has registered workloads connect to our successor."""
        self._leaving = True
        for member in list(self._members):
            member.say_goaway()

    # What `MeshConnections` calls, in this order.

    def prepare(self, context: ServerContext) -> None:
        """Has the TLS context ask us about names."""
        context.sni_callback = self._asked_for

    def make(self, lost: Callable[[Connection], None]) -> WorkloadConnection:
        """A connection; `lost` is called at its end."""

        def over(connection: Connection) -> None:
            lost(connection)
            self._lost(member)

        member = WorkloadConnection(
            client=True,
            keepalive=while_connected(self._settings.keepalive_s),
            on_change=lambda: self._changed(member),
            on_lost=over,
        )
        return member

    def admitted(self, connection: MemberConnection) -> None:
        """Its handshake is over."""
        member = cast("WorkloadConnection", connection)
        if member.identity is not None:
            self._members.add(member)
            spawn(self._greet(member), name=f"register {member.name} of {member.peer_name}")

    def refused(
        self,
        peer: str,
        duration_s: float,
        error: HboneError,
        name: str = "",
        identity: str = "",
    ) -> None:
        """A connection has come to nothing."""
        self._report(TunnelRecord(peer=peer, sni=name, route=ROUTE, identity=identity), error, duration_s)

    def let_go(self, connection: MemberConnection, error: RefusedError) -> None:
        """Takes a workload's name away; its tunnels finish."""
        member = cast("WorkloadConnection", connection)
        log.info("%s of %s loses its name: %s", member.name, member.peer_name, error)
        if member.registration is not None:
            self._registry.discard(member.registration)
        member.drain()

    def expel(self, connection: MemberConnection, error: DeniedError) -> None:
        """Ends the connection of a workload that is not let in any more, with its tunnels."""
        member = cast("WorkloadConnection", connection)
        member.expelled = error
        if member.registration is not None:
            self._registry.discard(member.registration)
        member.expel(error)

    # One connection.

    def _asked_for(
        self, tls: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext
    ) -> int | None:
        name = (name or "").lower()
        try:
            check_host_name(name)
        except ValueError:
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        if not self._rules.may_be_registered(name):
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        tls.asked_for = name  # type: ignore[union-attr]  # read by connection_made
        return None

    async def _greet(self, member: WorkloadConnection) -> None:
        """Tells a workload the verdict, and gives it its name once it has answered (rule 2)."""
        began = asyncio.get_running_loop().time()
        try:
            self._check(member)
        except RefusedError as error:
            self._refuse(member, error, began)
            with contextlib.suppress(UpstreamError):  # it has gone, or does not care
                await self._tell(member, str(error))
            member.drain()
            return
        try:
            status = await self._tell(member, None)
            if status == ALREADY_REGISTERED:
                log.debug("%s is here already as %s", member.peer_name, member.name)
                member.drain()
                return
            if status != REGISTERED:
                raise UpstreamError(f"register {member.name}: the workload answered {status}")
            self._check(member)  # others may have been quicker
        except HboneError as error:
            self._refuse(member, error, began)
            member.drain()
            return
        self._register(member)

    def _check(self, member: WorkloadConnection) -> None:
        """Raises RefusedError unless it may have its name now."""
        assert member.identity is not None
        self._rules.check(member.identity, member.name)
        self._registry.check_room(member.name)
        if self._leaving:
            raise LeavingError("the gateway stops")

    async def _tell(self, member: WorkloadConnection, refusal: str | None) -> int:
        """Its answer's status. Raises UpstreamError."""
        verdict = Verdict(self._process, self._workers, refusal)
        stream = member.open(registration.request(member.name, verdict), end_stream=True)
        try:
            status = await stream.response(self._settings.handshake_timeout_s)
            member.has_answered = True
            return status
        finally:
            if not stream.over:
                stream.abort()

    def _refuse(self, member: WorkloadConnection, error: HboneError, began: float) -> None:
        duration_s = asyncio.get_running_loop().time() - began
        self.refused(member.peer_name, duration_s, error, member.name, str(member.identity))

    def _register(self, member: WorkloadConnection) -> None:
        assert member.identity is not None
        if not member.usable:
            return  # it has gone in this very turn
        now = asyncio.get_running_loop().time()
        it = member.registration = Registration(member.name, member.identity, member, member.peer_name, now)
        self._registry.add(it)
        self.total += 1
        _record(it).write_registered(self._access_log)

    # The end of a registration.

    def _changed(self, member: WorkloadConnection) -> None:
        if member.registration is None:
            return
        if not member.usable:
            self._registry.discard(member.registration)
        elif member.room > 0:
            self._registry.changed(member.name)

    def _lost(self, member: WorkloadConnection) -> None:
        self._members.discard(member)
        if not self._members:
            self.over.set()
        it = member.registration
        if it is None:
            return
        self._registry.discard(it)
        error: HboneError | None = member.expelled
        if error is None and not member.ended_in_order:
            cause = member.cause or "closed by the workload"
            error = StreamResetError(f"registration lost: {cause}", CANCEL)
        record = _record(it)
        duration_s = asyncio.get_running_loop().time() - it.since
        if error is None:
            record.duration_s = duration_s
        else:
            record.fail(error, duration_s)
            self._refusals.recent.add(record)
        record.write_unregistered(self._access_log)


def _record(it: Registration) -> TunnelRecord:
    return TunnelRecord(peer=it.peer, sni=it.name, route=ROUTE, identity=str(it.identity))

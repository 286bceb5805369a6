"""Reverse tunnels, krun's end: dials gateways, registers names there, and serves what comes back.

What comes in on these connections is served as on the tunnel port.

For each name and each address there is a place, and for each place a task:

1. A place is filled when it has as many connections as there are gateways behind the address, times the
   worker processes of each, all to different processes (the gateway says how many, and who it is). What leads
   to a process that we have already is closed again: a load balancer, or the kernel, dealt us to it twice.
2. A connection that ends, or on which GOAWAY came, leaves its place at once, and a new one is dialled while
   the streams of the old one finish.
3. Before each dial there is a pause, which is random between nothing and a bound (full jitter), so that the
   workloads of a gateway that has ended do not come to the next one all at once. The bound is FIRST_PAUSE_S,
   doubled with each failure up to MAX_PAUSE_S; a connection that ends before STEADY_S counts as a failure.
   What led to a process twice doubles it only after as many times as there are processes to find.
4. The gateway has to prove who it is before a byte of it is looked at: here the server is who dialled. One
   whose certificate is revoked is left at once; one whose certificate ends gets GOAWAY, and its tunnels have
   the drain timeout.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from agent.config.own_identity import own_trust_domain
from agent.config.reverse_settings import ReverseSettings
from shared.address import Address
from shared.backoff import doubled_s
from shared.errors import DeniedError, ExpiredError, HboneError, RefusedError, UpstreamError
from shared.http2.session import SessionLimits
from shared.net.dial import Origin, dial_http2
from shared.net.http2.answers import answer
from shared.net.http2.connection import Connection
from shared.net.http2.liveness import while_connected
from shared.net.legs.stream import Stream, header_value
from shared.net.tls.certificate_expiry import CertificateExpiry
from shared.net.tls.mesh_tls import (
    MeshIdentity,
    chain_end,
    check_server,
    client_context,
    proved_identity,
    revocation_watch,
)
from shared.net.tls.revocation_watch import RevocationWatch
from shared.tasks import spawn
from shared.trust.peer_patterns import UNTOLD, TrustDomain
from shared.trust.peer_policy import PeerPolicy
from shared.tunnel import registration
from shared.tunnel.registration import ALREADY_REGISTERED, REGISTERED, Verdict

log = logging.getLogger("hbone.agent")

FIRST_PAUSE_S = 0.1
"""A restarted hgate is there again within half a second."""

MAX_PAUSE_S = 30.0
"""How long a gateway that has come back may wait for us, at most; half of it on average."""

STEADY_S = 10.0
"""A connection that has lived so long is no sign that the next would fail."""

VERDICT_S = 10.0
"""For the gateway to say whether we are registered: one round trip after the handshake."""


class ReverseTunnels:
    """All registrations of this krun. `request(stream)` gets every request, `opened(connection)` and
    `lost(connection)` are called once each for every connection that was made, in the end."""

    def __init__(
        self,
        settings: ReverseSettings,
        certificates: Path,
        dial_timeout_s: float,
        *,
        drain_timeout_s: float,
        trust: TrustDomain = UNTOLD,
        crl: Path | None = None,
        wall_clock: Callable[[], float] = time.time,
        request: Callable[[Stream], None],
        opened: Callable[[Connection], None],
        lost: Callable[[Connection], None],
    ) -> None:
        """`certificates` is the workload's folder; `dial_timeout_s` is for TCP and TLS to a gateway,
        `drain_timeout_s` for the tunnels of one whose certificate has ended, by `wall_clock`. `trust` is our
        trust domain, `crl` a file with certificate revocation lists.

        Raises UnavailableError, ConfigError or DeniedError if the certificates, or the lists, are none.
        """
        peers = settings.peers or own_trust_domain(certificates)
        of_us = MeshIdentity(certificates, peers, crl=crl, trust=trust)
        client_context(of_us, asyncio.get_running_loop().time())
        PeerPolicy(peers, trust=trust)
        self._revocations = revocation_watch(of_us, purpose="reverse")
        if self._revocations is not None:
            self._revocations.read()
            self._revocations.follow(self._end_revoked)
        log.info("reverse: gateways have to be %s", ", ".join(peers))
        self._places = [
            _Place(
                Origin(
                    "https",
                    name,
                    address,
                    identity=dataclasses.replace(of_us, server_name=name),
                    searched=True,
                ),
                settings,
                dial_timeout_s,
                request,
                opened,
                lost,
                self._revocations,
                drain_timeout_s=drain_timeout_s,
                wall_clock=wall_clock,
            )
            for address in settings.gateways
            for name in settings.names
        ]
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def registered(self) -> int:
        """Connections that are registered now."""
        return sum(len(place.live) for place in self._places)

    def start(self) -> None:
        """From now on registers, and registers again."""
        if self._revocations is not None:
            self._revocations.start()
        self._tasks = [spawn(place.keep(), name=f"register with {place.origin}") for place in self._places]

    def stop(self) -> None:
        """Dials no more. The connections are those that `opened` was told: their ends are the owner's."""
        for task in self._tasks:
            task.cancel()

    def close(self) -> None:
        """Dials no more, and follows the revocation lists no longer."""
        self.stop()
        if self._revocations is not None:
            self._revocations.close()

    def _end_revoked(self) -> int:
        return sum(place.end_revoked() for place in self._places)


class _Place:
    """One name at one address."""

    def __init__(
        self,
        origin: Origin,
        settings: ReverseSettings,
        dial_timeout_s: float,
        request: Callable[[Stream], None],
        opened: Callable[[Connection], None],
        lost: Callable[[Connection], None],
        revocations: RevocationWatch | None,
        *,
        drain_timeout_s: float,
        wall_clock: Callable[[], float],
    ) -> None:
        self.origin = origin
        self.drain_timeout_s = drain_timeout_s
        self.wall_clock = wall_clock
        self.revocations = revocations
        self.open: set[GatewayConnection] = set()
        """Connections, registered or not, that have not ended."""
        self.live: dict[str, GatewayConnection] = {}
        """Registered connections by the gateway's process."""
        self.opened = opened
        self.request = request
        self.told_lost = lost
        self._settings = settings
        self._dial_timeout_s = dial_timeout_s
        self._workers = 1  # of a gateway, as one has told
        self._failures = 0  # in a row
        self._repeats = 0  # connections in a row to processes that we had already
        self._not_before = 0.0  # the loop's time of the next dial
        self._changed = asyncio.Event()

    @property
    def address(self) -> Address:
        """Whom it dials."""
        return self.origin.address

    @property
    def name(self) -> str:
        """What it registers."""
        return self.origin.host

    # What the connections tell.

    def judge(self, connection: GatewayConnection, verdict: Verdict) -> int:
        """The status that the gateway's verdict is answered with."""
        if verdict.refusal is not None:
            return REGISTERED
        self._workers = verdict.workers
        held = self.live.get(verdict.process)
        if held is not None and held is not connection:
            return ALREADY_REGISTERED
        self.live[verdict.process] = connection
        return REGISTERED

    def end_revoked(self) -> int:
        """Ends the connections to gateways that are revoked by now; how many."""
        count = 0
        for connection in list(self.open):
            error = None if self.revocations is None else self.revocations.verdict(connection.proof)
            if error is not None and not connection.lost:
                connection.expel(error)
                count += 1
        return count

    def left(self, connection: GatewayConnection) -> None:
        """It has ended, or GOAWAY came: it counts no more."""
        verdict = connection.verdict
        if verdict is not None and self.live.get(verdict.process) is connection:
            del self.live[verdict.process]
            steady = asyncio.get_running_loop().time() - connection.made >= STEADY_S
            self._failures = 0 if steady else self._failures + 1
            self._pause(self._failures)
            self._changed.set()

    # The task.

    async def keep(self) -> None:
        """Fills the place, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            while len(self.live) >= self._wanted:
                self._changed.clear()
                await self._changed.wait()
            await asyncio.sleep(max(0.0, self._not_before - loop.time()))
            try:
                registered = await self._register()
            except HboneError as error:
                self._failures += 1
                self._pause(self._failures)
                log.warning("register %s with %s: %s", self.name, self.address, error)
            else:
                self._repeats = 0 if registered else self._repeats + 1
                self._pause(self._repeats // self._wanted)

    @property
    def _wanted(self) -> int:
        return self._settings.behind_each * self._workers

    def _pause(self, doublings: int) -> None:
        """Puts the next dial off, by a random time; each doubling doubles the longest."""
        bound_s = doubled_s(FIRST_PAUSE_S, MAX_PAUSE_S, doublings)
        now = asyncio.get_running_loop().time()
        self._not_before = max(self._not_before, now + random.uniform(0.0, bound_s))

    async def _register(self) -> bool:
        """One more connection; False if it led to a process that we have already. Raises HboneError."""
        connection = await dial_http2(
            self.origin, self._dial_timeout_s, lambda: GatewayConnection(self, self._settings)
        )
        try:
            async with asyncio.timeout(VERDICT_S):
                verdict = await connection.told
        except TimeoutError as error:
            connection.abort("no verdict")
            raise UpstreamError(f"no word from the gateway within {VERDICT_S:g} s") from error
        if verdict is None:
            cause = connection.cause or "it ended the connection"
            raise UpstreamError(f"no word from the gateway, whose log may say why: {cause}")
        if verdict.refusal is not None:
            connection.drain()
            raise DeniedError(f"the gateway refuses it: {verdict.refusal}")
        if self.live.get(verdict.process) is not connection:
            connection.drain()
            return False
        log.info("registered %s with %s, process %s", self.name, self.address, verdict.process)
        return True


class GatewayConnection(Connection):
    """A connection that we dialled and serve. `told` is done when the gateway has said its verdict, or with
    None when it has ended without."""

    def __init__(self, place: _Place, settings: ReverseSettings) -> None:
        super().__init__(
            client=False,
            keepalive=while_connected(settings.keepalive_s),
            limits=SessionLimits(max_streams=settings.streams, extended_connect=True),
            on_request=self._take,
            on_change=self._look_at_end,
            on_lost=self._over,
        )
        loop = asyncio.get_running_loop()
        self.told: asyncio.Future[Verdict | None] = loop.create_future()
        self.verdict: Verdict | None = None
        self.made = loop.time()
        self._place = place
        self._expiry: CertificateExpiry | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._place.opened(self)
        identity = self._place.origin.identity
        assert identity is not None
        try:
            tls = transport.get_extra_info("ssl_object")
            self.proof = check_server(identity, tls, self._place.revocations)
            self.certificate_ends = chain_end(tls)
        except RefusedError as error:
            self.abort(str(error))  # before it can send a request
        else:
            self._place.open.add(self)
            self._watch_expiry(str(proved_identity(tls)))

    def _watch_expiry(self, whose: str) -> None:
        self._expiry = CertificateExpiry(
            self.certificate_ends,
            whose,
            ended=self._expired,
            over=self.expel,
            drain_timeout_s=lambda: self._place.drain_timeout_s,
            wall_clock=self._place.wall_clock,
        )
        self._expiry.start()

    def _expired(self, error: ExpiredError) -> None:
        log.warning(
            "gateway %s: %s: another connection is made; open tunnels have %g s",
            self.peer_name,
            error,
            self._place.drain_timeout_s,
        )
        self.drain()
        self._place.left(self)

    def _take(self, stream: Stream) -> None:
        if self._expiry is None or not self._expiry.allows_stream():
            stream.refuse()
            return
        if header_value(stream.headers, b":path") != registration.PATH:
            self._place.request(stream)
            return
        try:
            verdict = registration.read(stream.headers)
        except ValueError as error:
            answer(stream, HTTPStatus.BAD_REQUEST, str(error))
            return
        if self.verdict is None:
            self.verdict = verdict
        status = self._place.judge(self, self.verdict)
        stream.respond([(b":status", str(status).encode())], end_stream=True)
        self._tell(verdict)

    def _look_at_end(self) -> None:
        if not self.usable:
            self._place.left(self)

    def _over(self, connection: Connection) -> None:
        if self._expiry is not None:
            self._expiry.close()
            self._expiry = None  # the two name each other
        self._place.open.discard(self)
        self._place.left(self)
        self._tell(None)
        if self.verdict is not None and self.verdict.refusal is None and not self.ended_in_order:
            log.warning(
                "registration of %s with %s lost: %s",
                self._place.name,
                self._place.address,
                self.cause or "closed by the gateway",
            )
        self._place.told_lost(connection)

    def _tell(self, verdict: Verdict | None) -> None:
        if not self.told.done():
            self.told.set_result(verdict)

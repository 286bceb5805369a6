"""The built-in mTLS end: what Envoy does on 127.0.0.1:15003, where no Envoy runs.

The rules:

1. The app is dialled only for a peer that has proved an allowed SPIFFE identity. The TLS handshake of any
   other peer fails. Where bytes are passed on, a peer whose app cannot be reached is reset, before a byte of
   its data was read.
2. HTTP is served where the app is known to speak it, and where nobody has said what it speaks to clients that
   offer HTTP by ALPN, as Envoy does in the same place. So the app is told who calls.
3. A connection whose bytes are passed on is reported once: when it ended, or when it was refused. So is one
   that had HTTP in it, if it was refused, or ended by us for a fault; its requests have reports of their own.
4. A peer whose certificate is revoked is refused (`server_tls`), and reset if it has come already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from agent.config.settings import AppProtocol
from agent.mtls.app_alpn import builtin_offer
from agent.mtls.client_certificate import forwarded
from agent.mtls.http_connection import HTTP1, HTTP2, HttpConnection
from agent.mtls.server_tls import ServerTls
from agent.proxy.downstream import Caller, Downstream
from shared.address import Address
from shared.errors import DeniedError, DialError, HboneError, LimitError, StreamResetError
from shared.http2.frames import CANCEL
from shared.listen import bound_address, listen
from shared.net.dial import dial
from shared.net.http2.answers import answer
from shared.net.legs.tcp import Surplus
from shared.net.legs.tls import HANDSHAKE_TIMEOUT_S, TlsServerLeg
from shared.net.relay.memory_budget import Holder
from shared.net.relay.relay import HALF_CLOSED_TIMEOUT_S, Relay
from shared.net.tls.certificate_files import LOOK_EVERY_S
from shared.net.tls.revocation_watch import LOOK_EVERY_S as LISTS_EVERY_S
from shared.tasks import spawn
from shared.trust.peer_policy import PeerPolicy
from shared.trust.revocations import Proof
from shared.trust.spiffe import peer_id
from shared.tunnel.tunnel_record import TunnelRecord

log = logging.getLogger("hbone.inbound")


@dataclass(frozen=True, slots=True)
class InboundSettings:
    """Where the mTLS end listens, what it proves about itself and where it hands over."""

    listen: Address
    """127.0.0.1:15003 (`shared.ports`): only the tunnel's end in this container has business here."""

    app: Address
    """The app, plain TCP."""

    protocol: AppProtocol
    """What it speaks."""

    certificates: Path
    """PEM file: the workload's certificate, then the rest of its chain."""

    private_key: Path
    """PEM file: the key of the certificate, not encrypted."""

    roots: Path
    """PEM file: the mesh's roots, to which client certificates must lead."""

    bundles: Path | None = None
    """JSON file: which of them are whose, if it is there."""

    max_connections: int = 1000
    """Connections at once, Cloud Run's largest concurrency per instance; further ones are reset."""

    dial_timeout_s: float = 5.0
    """How long the app may take to accept; on loopback a longer wait means a full backlog."""

    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
    """How long a client may take from accept to the end of its handshake."""

    half_closed_timeout_s: float = HALF_CLOSED_TIMEOUT_S
    """How long one direction may be silent once the other has ended."""

    look_every_s: float = LOOK_EVERY_S
    """How often the files are looked at when connections come."""

    crl: Path | None = None
    """PEM or DER file with certificate revocation lists, which is followed; None: nobody is revoked."""

    lists_every_s: float = LISTS_EVERY_S
    """How often that file is looked at."""


def no_app(request: Downstream, caller: Caller) -> None:
    """Answers a request while no app is there."""
    answer(request, HTTPStatus.SERVICE_UNAVAILABLE, "krun is starting")


class Inbound:
    """The mTLS listener and its connections. `finished` gets each connection's record once."""

    def __init__(
        self,
        settings: InboundSettings,
        policy: PeerPolicy,
        finished: Callable[[TunnelRecord], None],
        refusal: Callable[[], LimitError | None] = lambda: None,
        serve: Callable[[Downstream, Caller], None] = no_app,
    ) -> None:
        """`refusal()` says why no connection is accepted now, if so. `serve(request, caller)` answers a
        request."""
        self._settings = settings
        self._serve_request = serve
        self._refusal = refusal
        self.most_connections = settings.max_connections
        """At once; may be changed at any time."""
        self._finished = finished
        self._connections: dict[TlsServerLeg, _Connection] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._tls = ServerTls(
            (settings.certificates, settings.private_key, settings.roots),
            settings.bundles,
            policy,
            purpose="inbound",
            crl=settings.crl,
            alpn=builtin_offer(settings.protocol),
            look_every_s=settings.look_every_s,
            lists_every_s=settings.lists_every_s,
        )
        self._server: asyncio.Server | None = None
        self._draining = False

    @property
    def address(self) -> Address:
        """Where it listens, once started; tells the port if the setting was 0."""
        assert self._server is not None, "not started"
        return bound_address(self._server)

    @property
    def connections(self) -> int:
        """TCP connections that are open now, refused ones that have yet to close included."""
        return len(self._connections)

    def holders(self) -> Iterator[Holder]:
        """All that holds bytes for its peers, but for requests."""
        for connection in self._connections.values():
            if connection.relay is not None and not connection.relay.over:
                yield connection.relay
            elif connection.http is not None:
                yield connection.http

    async def start(self) -> None:
        """Reads the files and listens.

        Raises:
            UnavailableError: a file is missing, or the address is taken.
            ConfigError: a file has not what it should.
        """
        self._tls.start(self._end_revoked)
        self._server = await listen(self._settings.listen, self._accept, purpose="built-in mTLS end")

    def drain(self) -> None:
        """Tells clients that speak HTTP to open nothing new here, those that come now included."""
        self._draining = True
        for connection in list(self._connections.values()):
            if connection.http is not None:
                connection.http.drain()

    async def emptied(self) -> None:
        """Returns when no connection is open."""
        await self._empty.wait()

    async def close(self, drain_s: float) -> None:
        """Stops listening, gives open connections `drain_s` seconds to end, then resets those left."""
        if self._server is not None:
            self._server.close()
        self._tls.close()
        try:
            async with asyncio.timeout(drain_s):
                await self._empty.wait()
        except TimeoutError:
            log.info("inbound: resetting %d connections, still open after %g s", self.connections, drain_s)
            error = StreamResetError(f"drain: still open after {drain_s:g} s", CANCEL)
            for connection in list(self._connections.values()):
                self._cut(connection, error)
            await self._empty.wait()

    # Owner of the legs.

    def established(self, leg: TlsServerLeg) -> None:
        connection = self._connections[leg]
        try:
            connection.proof = self._tls.prove(leg)
        except DeniedError as error:  # revoked since it was let in
            self._cut(connection, error)
            return
        connection.identity = str(peer_id(leg.certificate))
        if self._is_http(leg.alpn):
            told = forwarded(leg.certificate, leg.own_certificate())
            caller = Caller(leg.peer_name, connection.identity, told)
            connection.http = HttpConnection(leg, lambda request: self._serve_request(request, caller))
        leg.certificate = b""  # for as long as the connection lives the name will do
        if connection.http is not None:
            connection.http.start()
            if self._draining:
                connection.http.drain()
        else:
            connection.serving = spawn(self._serve(connection), name=f"inbound {leg.peer_name}")

    def _is_http(self, alpn: str) -> bool:
        protocol = self._settings.protocol
        return protocol in ("http1", "h2c") or (protocol == "auto" and alpn in (HTTP1, HTTP2))

    def refused(self, leg: TlsServerLeg, error: HboneError) -> None:
        self._report(self._connections[leg], error)

    def closed(self, leg: TlsServerLeg) -> None:
        connection = self._connections[leg]
        connection.closed = True
        if connection.http is not None:
            connection.http.lost()
            connection.reported = True
        elif connection.serving is None:  # else whoever serves it finds out and says so
            self._report(connection, StreamResetError("connection lost", CANCEL))
        self._settle(connection)

    # One connection.

    def _accept(self) -> asyncio.BaseProtocol:
        now = asyncio.get_running_loop().time()
        refusal = self._refusal() or self._one_too_many()
        if refusal is not None:
            return Surplus(lambda client: self._turned_away(client, refusal))
        timeout_s = self._settings.handshake_timeout_s
        leg = TlsServerLeg(self._tls.context(), self, handshake_timeout_s=timeout_s)
        self._connections[leg] = _Connection(leg, now)
        self._empty.clear()
        return leg

    async def _serve(self, connection: _Connection) -> None:
        try:
            app = await dial(self._settings.app, self._settings.dial_timeout_s)
        except DialError as error:
            connection.leg.abort()
            self._report(connection, error)
            return
        connection.relay = Relay(
            connection.leg,
            app,
            lambda relay: self._report(connection, relay.error),
            half_closed_timeout_s=self._settings.half_closed_timeout_s,
        )
        connection.relay.start()

    def _end_revoked(self) -> int:
        """Ends the connections of peers that are revoked by now; how many."""
        count = 0
        for connection in list(self._connections.values()):
            error = self._tls.verdict(connection.proof)
            if error is not None and not connection.reported:
                self._cut(connection, error)
                count += 1
        return count

    def _cut(self, connection: _Connection, error: HboneError) -> None:
        if connection.relay is not None:
            connection.relay.abort(error)  # nothing, if it is over and its last bytes are leaving
        elif connection.serving is not None:
            connection.serving.cancel()
        connection.leg.abort()
        self._report(connection, error)

    def _one_too_many(self) -> LimitError | None:
        limit = self.most_connections
        if len(self._connections) < limit:
            return None
        return LimitError(f"{limit} connections are open, which is HBONE_MAX_TUNNELS", "HBONE_MAX_TUNNELS")

    def _turned_away(self, client: str, error: LimitError) -> None:
        record = TunnelRecord(peer=client, target=self._settings.app, sent_bytes=0, received_bytes=0)
        record.fail(error, 0.0)
        self._finished(record)

    def _report(self, connection: _Connection, error: HboneError | None) -> None:
        if connection.reported:
            return
        connection.reported = True
        record = TunnelRecord(
            peer=connection.leg.peer_name,
            target=self._settings.app,
            identity=connection.identity,
            sent_bytes=0,
            received_bytes=0,
            opened=bool(connection.identity),
        )
        age_s = asyncio.get_running_loop().time() - connection.accepted_s
        if connection.relay is not None:
            record.end(connection.relay, age_s)
        elif error is not None:
            record.fail(error, age_s, one_ended=True)
        self._finished(record)
        self._settle(connection)

    def _settle(self, connection: _Connection) -> None:
        """Forgets a connection that is both closed and reported; either may come first."""
        if connection.closed and connection.reported:
            connection.relay = None  # ends the cycle through its callback
            connection.http = None
            self._connections.pop(connection.leg, None)
            if not self._connections:
                self._empty.set()


class _Connection:
    """What is known of an open connection."""

    __slots__ = (
        "accepted_s",
        "closed",
        "http",
        "identity",
        "leg",
        "proof",
        "relay",
        "reported",
        "serving",
    )

    def __init__(self, leg: TlsServerLeg, accepted_s: float) -> None:
        self.leg = leg
        self.accepted_s = accepted_s  # the loop's clock
        self.identity = ""
        self.proof: Proof = ()
        self.serving: asyncio.Task[None] | None = None
        self.relay: Relay | None = None
        self.http: HttpConnection | None = None
        self.closed = False
        self.reported = False

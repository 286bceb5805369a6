"""Inner HBONE: what ends in krun of `/_hbone/15008`, for ztunnel and others of the ambient mesh.

The tunnel's bytes are TLS of the mesh, in that is HTTP/2, and in that a CONNECT for a service of this
workload. All of it is in this process: no port, and no socket but the app's.

The rules:

1. TLS 1.3, ALPN h2, a client certificate. The peer is judged in the handshake as at the built-in end, by the
   same patterns, bundles and lists (`server_tls`).
2. A CONNECT is answered as ztunnel and hgate's HBONE port answer: 400 for what is no target, 401 where it is
   no service of ours, 405 for another method, 503 where the app cannot be connected or there are too many,
   else 200, with our baggage, once the app is connected.
3. A client makes an inner connection for each connection of its own, and the tunnel that carries it is one
   of those that HBONE_MAX_TUNNELS bounds. CONNECTs have the same bound once more, for a client may put
   several into one.
4. Each CONNECT has a record, and each connection that was refused before it could have one.
5. A peer whose certificate is revoked is refused, and reset if it has come already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from agent.mtls.http_connection import HTTP2
from agent.mtls.leg_transport import LegTransport
from agent.mtls.own_services import OwnServices
from agent.mtls.server_tls import ServerTls
from shared.address import Address
from shared.errors import (
    BadRequestError,
    DeniedError,
    HboneError,
    LimitError,
    RefusedError,
    TlsFailureError,
)
from shared.http2.events import Headers
from shared.http2.session_limits import SessionLimits
from shared.net.dial import dial
from shared.net.http2.connection import Connection
from shared.net.legs.carried import CarriedLeg
from shared.net.legs.contract import Leg
from shared.net.legs.stream import Stream, header_value
from shared.net.legs.tls import TlsServerLeg
from shared.net.relay.memory_budget import Holder
from shared.net.relay.tunnel_clock import TunnelClock
from shared.net.tls.certificate_folder import CertificatePaths
from shared.trust.peer_policy import PeerPolicy
from shared.trust.revocations import Proof
from shared.trust.spiffe import peer_id
from shared.tunnel.connect_target import read_authority
from shared.tunnel.request_context import forwarded_for
from shared.tunnel.tunnel_record import TunnelRecord
from shared.tunnel.tunnel_server import ServedTunnel

ROUTE = "hbone"
"""What these tunnels have where others have their target: in the metrics, the access log and the dump."""

LIMITS = SessionLimits()

WRONG_END = "for the mTLS of sidecars the tunnel URL ends in /_hbone/15003"
"""Said to clients that have come here with it."""

NO_ALPN = "tls handshake: the client does not offer HTTP/2 (ALPN h2)"


def refuse_offer(offered: list[str]) -> None:
    """Refuses a client by what it offers by ALPN, among which is no h2. Raises TlsFailureError."""
    names = ", ".join(offered)
    raise TlsFailureError(f"tls handshake: the client offers {names[:60]!a} by ALPN, not h2: {WRONG_END}")


@dataclass(frozen=True, slots=True)
class InnerHboneSettings:
    """What inner HBONE proves, where it leads, and its bounds."""

    files: CertificatePaths
    """The workload's certificate, its key and the mesh's roots."""

    services: OwnServices
    """Whom CONNECTs may ask for."""

    baggage: bytes
    """What each 200 says of us."""

    dial_timeout_s: float
    handshake_timeout_s: float
    """From the tunnel's 200 to the end of the handshake in it."""

    connection_idle_timeout_s: float | None
    """How long a connection without a CONNECT is kept; None: for ever."""

    idle_timeout_s: float
    """How long an open CONNECT may be silent; 0: for ever."""

    half_closed_timeout_s: float
    crl: Path | None = None


class InnerHbone:
    """The end, its connections and their tunnels. `finished` gets the record of each tunnel, and of each
    connection that was refused. `refusal()` says why no tunnel is accepted now, if so."""

    def __init__(
        self,
        settings: InnerHboneSettings,
        policy: PeerPolicy,
        finished: Callable[[TunnelRecord], None],
        refusal: Callable[[], LimitError | None],
        *,
        most_tunnels: Callable[[], int],
    ) -> None:
        """`most_tunnels()` CONNECTs may be open at once; further ones get 503."""
        self._settings = settings
        self._finished = finished
        self._refusal = refusal
        self._most_tunnels = most_tunnels
        self.tunnels: set[ServedTunnel] = set()
        """CONNECTs that are not over, those that are being connected included."""
        self._connections: dict[TlsServerLeg, _Inner] = {}
        self._by_stream: dict[Stream, _Inner] = {}
        self._clock = TunnelClock(settings.idle_timeout_s)
        self._answer: Headers = ((b"baggage", settings.baggage),) if settings.baggage else ()
        self._draining = False
        self._tls = ServerTls(
            settings.files.all,
            settings.files.bundles,
            policy,
            purpose="inner hbone",
            crl=settings.crl,
            alpn=(HTTP2,),
            tls13_only=True,
            no_common=refuse_offer,
        )

    @property
    def connections(self) -> int:
        """Those that are open, handshakes included."""
        return len(self._connections)

    def start(self) -> None:
        """Reads the files. Raises UnavailableError or ConfigError if they cannot be used."""
        self._tls.start(self._end_revoked)

    def leg(self, stream: Stream) -> Leg:
        """The end of a connection that begins in the tunnel of `stream`. Raises what reading the certificates
        raises, as long as they were never good."""
        leg = TlsServerLeg(self._tls.context(), self, handshake_timeout_s=self._settings.handshake_timeout_s)
        carried = CarriedLeg(leg, stream)
        self._connections[leg] = self._by_stream[stream] = _Inner(leg, stream)
        return carried

    def is_at_rest(self, stream: Stream) -> bool:
        """Whether the connection in the tunnel of `stream` has carried something, and carries nothing now: a
        client that is done may reset the tunnel, as ztunnel does."""
        inner = self._by_stream.get(stream)
        return inner is not None and inner.has_carried and inner.open_streams == 0

    def holders(self) -> Iterator[Holder]:
        """All that holds bytes for peers, beside the tunnels that carry the connections."""
        yield from self.tunnels
        yield from self._connections.values()

    def rows(self) -> list[dict[str, Any]]:
        """The connections for the admin port's dump."""
        return [
            {
                "peer": inner.leg.peer_name,
                "identity": inner.identity or None,
                "streams": inner.open_streams,
                "buffered_bytes": inner.buffered_bytes,
            }
            for inner in self._connections.values()
        ]

    def drain(self) -> None:
        """Has clients open nothing new, those that come now included; each connection closes when its last
        tunnel is over."""
        self._draining = True
        for inner in list(self._connections.values()):
            if inner.http2 is not None:
                inner.http2.drain()

    def close(self) -> None:
        """Ends what is left."""
        self._tls.close()
        self._clock.close()
        for inner in list(self._connections.values()):
            inner.leg.abort()

    # Owner of the legs.

    def established(self, leg: TlsServerLeg) -> None:
        inner = self._connections[leg]
        try:
            inner.proof = self._tls.prove(leg)
        except DeniedError as error:  # revoked since it was let in
            self._cut(inner, error)
            return
        inner.identity = str(peer_id(leg.certificate))
        leg.certificate = b""  # for as long as the connection lives the name will do
        http2 = inner.http2 = Connection(
            client=False,
            limits=LIMITS,
            on_request=partial(self._serve, inner),
            idle_timeout_s=self._settings.connection_idle_timeout_s,
        )
        fault = None if leg.alpn == HTTP2 else TlsFailureError(NO_ALPN)
        if fault is not None:
            self._report(inner, fault)  # and so no request of it is served
        inner.transport = LegTransport(leg, http2)
        inner.transport.join()
        if fault is not None:
            http2.expel(fault)
        elif self._draining:
            http2.drain()

    def refused(self, leg: TlsServerLeg, error: HboneError) -> None:
        self._report(self._connections[leg], error)

    def closed(self, leg: TlsServerLeg) -> None:
        inner = self._connections.pop(leg)
        del self._by_stream[inner.stream]
        if inner.transport is not None:
            inner.transport.lost(None)

    # One connection.

    def _serve(self, inner: _Inner, stream: Stream) -> None:
        if inner.is_refused:
            stream.abort()
            return
        inner.has_carried = True
        headers = stream.headers
        authority = header_value(headers, b":authority")
        record = TunnelRecord(
            peer=inner.leg.peer_name,
            route=ROUTE,
            identity=inner.identity,
            name=_shown(authority),
            stream=stream.id,
        )
        tunnel = ServedTunnel(
            stream,
            record,
            self._over,
            self._clock,
            half_closed_timeout_s=self._settings.half_closed_timeout_s,
            extra=self._answer,
        )
        self.tunnels.add(tunnel)
        if header_value(headers, b":method") != b"CONNECT":
            wrong = BadRequestError(f"inner HBONE takes CONNECT only: {WRONG_END}")
            tunnel.refuse(HTTPStatus.METHOD_NOT_ALLOWED, wrong, [(b"allow", b"CONNECT")])
            return
        try:
            if header_value(headers, b":protocol"):
                raise BadRequestError("a tunnel is opened with plain CONNECT, not with RFC 8441's")
            app = record.target = self._settings.services.address(read_authority(authority))
            self._check_room()
        except BadRequestError as error:
            tunnel.refuse(HTTPStatus.BAD_REQUEST, error)
        except DeniedError as error:
            tunnel.refuse(HTTPStatus.UNAUTHORIZED, error)
        except LimitError as error:
            tunnel.refuse(HTTPStatus.SERVICE_UNAVAILABLE, error)
        else:
            tunnel.carry(partial(self._dial, app), f"inner hbone tunnel to {app}")

    async def _dial(self, app: Address) -> Leg:
        return await dial(app, self._settings.dial_timeout_s)

    def _check_room(self) -> None:
        """Raises LimitError if there is none for the last of the tunnels, which is counted already."""
        refusal = self._refusal()
        if refusal is None and len(self.tunnels) > (most := self._most_tunnels()):
            text = f"{most} tunnels of inner HBONE are open, which is HBONE_MAX_TUNNELS"
            refusal = LimitError(text, "HBONE_MAX_TUNNELS")
        if refusal is not None:
            raise refusal

    def _over(self, tunnel: ServedTunnel) -> None:
        self.tunnels.discard(tunnel)
        record = tunnel.record
        record.forwarded_for = forwarded_for(header_value(tunnel.stream.headers, b"forwarded"))
        self._finished(record)

    def _end_revoked(self) -> int:
        """Ends the connections of peers that are revoked by now; how many."""
        count = 0
        for inner in list(self._connections.values()):
            error = self._tls.verdict(inner.proof)
            if error is not None and not inner.is_refused:
                self._cut(inner, error)
                count += 1
        return count

    def _cut(self, inner: _Inner, error: RefusedError) -> None:
        for tunnel in list(self.tunnels):
            if tunnel.stream.connection is inner.http2:
                tunnel.abort(error)
        self._report(inner, error)
        if inner.http2 is not None:
            inner.http2.expel(error)
        else:
            inner.leg.abort()

    def _report(self, inner: _Inner, error: HboneError) -> None:
        """Once: the connection is refused, and carries nothing any more."""
        if not inner.is_refused:
            inner.is_refused = True
            record = TunnelRecord(peer=inner.leg.peer_name, route=ROUTE, identity=inner.identity)
            record.fail(error, inner.age_s, one_ended=True)
            self._finished(record)


class _Inner:
    """What is known of an open connection."""

    __slots__ = (
        "_began",
        "has_carried",
        "http2",
        "identity",
        "is_refused",
        "leg",
        "proof",
        "stream",
        "transport",
    )

    def __init__(self, leg: TlsServerLeg, stream: Stream) -> None:
        self.leg = leg
        self.stream = stream
        """What carries it."""
        self.identity = ""
        self.proof: Proof = ()
        self.http2: Connection | None = None
        self.transport: LegTransport | None = None
        self.has_carried = False
        self.is_refused = False
        self._began = asyncio.get_running_loop().time()

    @property
    def age_s(self) -> float:
        return asyncio.get_running_loop().time() - self._began

    @property
    def open_streams(self) -> int:
        return 0 if self.http2 is None else self.http2.open_streams

    # A holder of `shared.net.relay.memory_budget`: its tunnels, and what carries it, count by themselves.

    @property
    def buffered_bytes(self) -> int:
        """What it has to send for no tunnel in particular."""
        return 0 if self.http2 is None else self.http2.session.pending_bytes

    def abort(self, error: HboneError) -> None:
        """Ends it, for it holds too much."""
        self.leg.abort()


def _shown(authority: bytes) -> str:
    """For the log: at most 100 characters, only visible ASCII ones."""
    return "".join(chr(byte) if 0x21 <= byte <= 0x7E else "?" for byte in authority[:100])

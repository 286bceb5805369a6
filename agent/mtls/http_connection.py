"""A client's connection that has HTTP in it, behind the built-in end's TLS: HTTP/1.1, or HTTP/2."""

from __future__ import annotations

from collections.abc import Callable

from agent.mtls.leg_transport import LegTransport
from agent.proxy.downstream import Downstream
from agent.proxy.http1_server import Http1Server
from shared.errors import HboneError
from shared.http2.frames import PREFACE_WORD
from shared.http2.session_limits import SessionLimits
from shared.net.http2.connection import Connection
from shared.net.legs.contract import Buffer, Leg
from shared.net.legs.tls import TlsServerLeg

HTTP2 = "h2"
HTTP1 = "http/1.1"

LIMITS = SessionLimits(extended_connect=True)
"""WebSockets are among the requests (RFC 8441)."""


class HttpConnection:
    """Serves what comes on `leg`, whose handshake is complete; `serve(request)` gets each request. ALPN
    says which version it is, or else the first bytes do."""

    __slots__ = ("_early", "_http1", "_http2", "_leg", "_serve", "_transport")

    def __init__(self, leg: TlsServerLeg, serve: Callable[[Downstream], None]) -> None:
        self._leg = leg
        self._serve = serve
        self._early = b""
        self._http1: Http1Server | None = None
        self._http2: Connection | None = None
        self._transport: LegTransport | None = None

    def start(self) -> None:
        """Serves the first request, if it has come, and those that follow."""
        self._leg.join(self)
        if self._is_known():
            self._begin()

    def drain(self) -> None:
        """Tells the client to open nothing new, and closes once all is answered."""
        if self._http1 is not None:
            self._http1.drain()
        elif self._http2 is not None:
            self._http2.drain()
        else:
            self._leg.close()

    def lost(self) -> None:
        """The connection is gone."""
        if self._transport is not None:
            self._transport.lost(None)
        if self._http1 is not None:
            self._http1.lost()

    # A holder of `shared.net.relay.memory_budget`: the requests count by themselves.

    @property
    def buffered_bytes(self) -> int:
        """What is to be sent for no request in particular, and what has come of the next one."""
        if self._http1 is not None:
            return self._http1.kept_bytes
        return 0 if self._http2 is None else self._http2.buffered_bytes

    def abort(self, error: HboneError) -> None:
        """Ends it, for it holds too much."""
        self._leg.abort()

    # RelayEnd, until it is known what the client speaks.

    def received(self, leg: Leg, data: Buffer) -> None:
        self._early += data
        if self._is_known():
            self._begin()

    def ended(self, leg: Leg) -> None:
        self._leg.close()

    def failed(self, leg: Leg, error: HboneError) -> None: ...

    def full(self, leg: Leg) -> None: ...

    def drained(self, leg: Leg) -> None: ...

    def _is_known(self) -> bool:
        if self._http1 is not None or self._http2 is not None:
            return False  # any more
        begin = self._early[: len(PREFACE_WORD)]
        return bool(self._leg.alpn) or begin == PREFACE_WORD or not PREFACE_WORD.startswith(begin)

    def _begin(self) -> None:
        early, self._early = self._early, b""
        leg = self._leg
        if leg.alpn == HTTP2 or (not leg.alpn and early.startswith(PREFACE_WORD)):
            self._http2 = Connection(client=False, limits=LIMITS, on_request=self._serve)
            self._transport = LegTransport(leg, self._http2)
            leg.pass_to(self._transport)
            self._transport.begin(early)
        else:
            self._http1 = Http1Server(leg, self._serve)
            leg.pass_to(self._http1)
            if early:
                self._http1.received(leg, early)

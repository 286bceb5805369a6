"""The requests that are on their way to the app: how many, what they hold, and which protocol carries each.

The rules:

1. What the app speaks is found out when the first request comes. That request waits, as do those that come
   meanwhile.
2. A WebSocket goes to the app as extended CONNECT if the app supports that, or else by Upgrade. When the app
   has agreed it is a tunnel like any other, with the tunnels' timeouts.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from agent.proxy.app_protocol import AppProtocol, Spoken
from agent.proxy.downstream import Caller, Downstream
from agent.proxy.exchange import Exchange, Waiting
from agent.proxy.fields import request_head
from agent.proxy.http1_connection import is_upgradable
from agent.proxy.http1_pool import Http1Pool
from agent.proxy.http2_exchange import request_headers
from agent.proxy.http2_pool import Http2Pool
from agent.proxy.request_record import RequestRecord, record_of
from shared.address import Address
from shared.errors import DialError, HboneError
from shared.http2.header_rules import list_bytes
from shared.net.legs.contract import Leg
from shared.net.legs.stream import Stream
from shared.net.relay.memory_budget import Holder
from shared.net.relay.relay import HALF_CLOSED_TIMEOUT_S, Relay
from shared.net.relay.tunnel_clock import TunnelClock


class AppRequests:
    """Carries requests to the app at `app`. `told` is what it speaks; None: that is found out."""

    def __init__(
        self,
        app: Address,
        dial_timeout_s: float,
        told: Spoken | None,
        *,
        clock: TunnelClock | None = None,
        half_closed_timeout_s: float = HALF_CLOSED_TIMEOUT_S,
        failed: Callable[[int, str], None] = lambda status, text: None,
        finished: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        """`finished` gets the records of callers' requests."""
        self._app = app
        self._told = told
        self._clock = clock
        self._half_closed_timeout_s = half_closed_timeout_s
        self._open: dict[Exchange, None] = {}
        self._unread: dict[Exchange, None] = {}  # finished, but for what the client has yet to read
        self._failed = failed
        self._finished = finished
        self._protocol = AppProtocol(app, told, dial_timeout_s)
        self._http1 = Http1Pool(
            app, dial_timeout_s, upgraded=self._upgraded_connection, http2=self._protocol.forget
        )
        self._http2 = Http2Pool(
            app, dial_timeout_s, upgraded=self._upgraded_stream, http1=self._protocol.forget
        )

    @property
    def open_requests(self) -> int:
        """Requests whose answers have not ended."""
        return len(self._open)

    @property
    def shared_bytes(self) -> int:
        """What waits on connections to an HTTP/2 app, for none of them in particular."""
        return self._http2.buffered_bytes

    def take(self, stream: Downstream, caller: Caller | None = None) -> None:
        """Answers a request with the app's answer, or with why there is none. `caller` has sent it through an
        mTLS end; None: it came through Cloud Run's front end."""
        certificate = None if caller is None else caller.certificate
        head = request_head(stream.headers, bodiless=stream.bodiless, client_certificate=certificate)
        exchange = Exchange(stream, head, self._over, self._carry_again, self._failed, caller)
        self._open[exchange] = None
        self._carry(exchange)

    def close(self) -> None:
        """Ends what is left."""
        self._protocol.close()
        self._http1.close()
        self._http2.close()

    # Which way.

    def _carry(self, exchange: Exchange, *, fresh: bool = False) -> None:
        """Hands an exchange to whoever speaks what the app does; `fresh`: not on a kept connection."""
        protocol, head = self._protocol, exchange.head
        if protocol.known is None:
            Waiting(exchange, self._carry_once_known(exchange), "what the app speaks")
        elif protocol.known == "h2c" or (protocol.was_silent and head.is_grpc):
            size = list_bytes(request_headers(head))
            if size > protocol.header_list_bytes:  # some apps would end the connection that all share
                text = f"headers of {size} bytes, the app accepts {protocol.header_list_bytes}"
                exchange.fail(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)
            elif not head.protocol or protocol.extended_connect:
                self._http2.carry(exchange)
            elif self._told is None:  # many that speak HTTP/2 speak HTTP/1.1 as well
                self._upgrade(exchange)
            else:
                text = "the app accepts no extended CONNECT (SETTINGS_ENABLE_CONNECT_PROTOCOL)"
                exchange.fail(HTTPStatus.NOT_IMPLEMENTED, text)
        elif head.protocol:
            self._upgrade(exchange)
        else:
            self._http1.carry(exchange, fresh=fresh)

    async def _carry_once_known(self, exchange: Exchange) -> None:
        try:
            await self._protocol.find_out()
        except DialError as error:
            exchange.unreachable(error, self._app, self._app)
        else:
            self._carry(exchange)

    def _upgrade(self, exchange: Exchange) -> None:
        if is_upgradable(exchange.head.protocol):
            self._http1.carry(exchange, fresh=True)
        else:
            text = "only a WebSocket can be had of an app that speaks HTTP/1.1"
            exchange.fail(HTTPStatus.NOT_IMPLEMENTED, text)

    def _carry_again(self, exchange: Exchange) -> None:
        self._carry(exchange, fresh=True)

    # Tunnels.

    def _upgraded_connection(self, exchange: Exchange, leg: Leg, early: bytes) -> None:
        relay = self._tunnel(exchange, leg)
        if early:
            relay.received(leg, early)

    def _upgraded_stream(self, exchange: Exchange, upstream: Stream) -> None:
        self._tunnel(exchange, upstream)

    def _tunnel(self, exchange: Exchange, upstream: Leg) -> Relay:
        tunnel = _Tunnel(exchange, upstream, self._tunnel_over, self._half_closed_timeout_s)
        if self._clock is not None:
            self._clock.watch(tunnel.relay)
        return tunnel.relay

    def _tunnel_over(self, relay: Relay) -> None:
        if self._clock is not None:
            self._clock.forget(relay)

    # Ends, and what is held.

    def _over(self, exchange: Exchange) -> None:
        self._open.pop(exchange, None)
        if exchange.stream.unsent_bytes:
            self._unread[exchange] = None
        if exchange.caller is not None:
            self._finished(record_of(exchange, exchange.caller, self._app))

    def holders(self) -> list[Holder]:
        """Whatever holds bytes for a request, what the client of a finished answer has yet to read
        included."""
        self._unread = {
            exchange: None
            for exchange in self._unread
            if exchange.stream.unsent_bytes and not exchange.stream.over
        }
        return [*self._open, *self._unread, *self._http1.leaving]


class _Tunnel:
    """Carries what an extended CONNECT has become."""

    def __init__(
        self,
        exchange: Exchange,
        upstream: Leg,
        over: Callable[[Relay], None],
        half_closed_timeout_s: float,
    ) -> None:
        self._exchange = exchange
        self._over = over
        self.relay = Relay(
            exchange.stream, upstream, self._finished, half_closed_timeout_s=half_closed_timeout_s
        )
        exchange.carrier = self
        exchange.stream.on_gone = None
        self.relay.start()

    @property
    def buffered_bytes(self) -> int:
        return self.relay.upstream.buffered_bytes

    def drop(self) -> None:
        self.relay.abort(HboneError("the request is over"))

    def _finished(self, relay: Relay) -> None:
        self._over(relay)
        self._exchange.tunnel_over(relay.sent_bytes, relay.received_bytes, relay.error)

"""An exchange with an app that speaks HTTP/2: one stream of a connection to it, beside the client's.

The rules:

1. Heads, bodies, trailers and interim answers pass as they are, less the fields of one hop. Each side that
   does not read stops the other.
2. The end of an answer ends the exchange; a request that had not ended by then is reset, not ended, at the
   app. The app's RST_STREAM after the head of its answer goes on to the client with its code.
3. What the app has refused (REFUSED_STREAM, or above GOAWAY's last stream) it has not dealt with, and is sent
   again where it can be (RFC 9113 section 8.7); what was lost with its connection, if it is idempotent.
4. An extended CONNECT (RFC 8441) is a tunnel once the app has answered 2xx.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from agent.proxy.exchange import Exchange
from agent.proxy.fields import Field, RequestHead, request_trailers, response_fields, response_trailers
from shared.errors import HboneError, StreamResetError
from shared.http2 import frames
from shared.http2.events import Headers
from shared.net.legs.contract import Buffer, Leg
from shared.net.legs.stream import Stream, status_of


def request_headers(head: RequestHead) -> list[Field]:
    """The header list of a request."""
    headers = [(b":method", head.method), (b":scheme", head.scheme), (b":path", head.path)]
    if head.authority:
        headers.append((b":authority", head.authority))
    if head.protocol:
        headers.append((b":protocol", head.protocol))
    headers += head.fields
    if head.takes_trailers:
        headers.append((b"te", b"trailers"))
    return headers


class Http2Exchange:
    """Carries an exchange on `upstream`, as the `RelayEnd` of both streams. `upgraded(exchange, upstream)`
    takes over what has become a tunnel; `http1()` is told where the app turns out not to speak HTTP/2."""

    __slots__ = ("_exchange", "_http1", "_is_over", "_request_ended", "_upgraded", "_upstream")

    def __init__(
        self,
        exchange: Exchange,
        upstream: Stream,
        *,
        upgraded: Callable[[Exchange, Stream], None],
        http1: Callable[[], None],
    ) -> None:
        self._exchange = exchange
        self._upstream = upstream
        self._upgraded = upgraded
        self._http1 = http1
        self._is_over = False
        downstream = exchange.stream
        self._request_ended = downstream.bodiless
        exchange.carrier = self
        upstream.on_interim = self._inform
        upstream.on_response = self._respond
        before = exchange.sent_before
        if before:
            upstream.write(before)
        if upstream.headers:  # while we waited for the stream
            self._respond(upstream.headers)
        if not self._is_over:
            upstream.join(self)
        if not self._is_over and not exchange.head.protocol:
            downstream.on_gone = None
            downstream.join(self)

    @property
    def buffered_bytes(self) -> int:
        """What it holds for the app, and of its answer."""
        return self._upstream.buffered_bytes

    def drop(self) -> None:
        """The exchange is over before its answer was whole."""
        if not self._is_over:
            self._let_go()
            self._upstream.abort()

    def _let_go(self) -> None:
        self._is_over = True
        self._upstream.on_interim = self._upstream.on_response = None  # which name us

    # The answer.

    def _inform(self, headers: Headers) -> None:
        status = status_of(headers)
        if not self._is_over and status != HTTPStatus.SWITCHING_PROTOCOLS:  # which HTTP/2 does not have
            self._exchange.inform(status, _plain(headers))

    def _respond(self, headers: Headers) -> None:
        if self._is_over:
            return
        exchange, upstream = self._exchange, self._upstream
        status = status_of(headers)
        if exchange.head.protocol and 200 <= status < 300:
            self._let_go()
            exchange.respond(status, _plain(headers))
            self._upgraded(exchange, upstream)
            return
        exchange.respond(status, _plain(headers), end=upstream.bodiless)
        if exchange.head.protocol:
            exchange.stream.on_gone = None
            exchange.stream.join(self)

    # RelayEnd.

    def received(self, leg: Leg, data: Buffer) -> None:
        if self._is_over:
            return
        if leg is self._upstream:
            self._exchange.write(data)
        elif not self._exchange.head.protocol:
            self._exchange.sent(data, keep=not self._exchange.answered)
            self._upstream.write(data)

    def ended(self, leg: Leg) -> None:
        if self._is_over:
            return
        downstream, upstream = self._exchange.stream, self._upstream
        if leg is upstream:
            trailers = response_trailers(upstream.trailers)
            if trailers:
                downstream.end_with_trailers(trailers)
            self._let_go()
            if self._request_ended:
                upstream.close()
            else:
                upstream.abort()  # what it got of the request must not look like the whole
            self._exchange.finish()
        elif not self._request_ended:
            self._request_ended = True
            trailers = request_trailers(downstream.trailers)
            if trailers:
                upstream.end_with_trailers(trailers)
            else:
                upstream.write_eof()

    def failed(self, leg: Leg, error: HboneError) -> None:
        if self._is_over:
            return
        self._let_go()
        exchange = self._exchange
        if leg is not self._upstream:
            self._upstream.abort()
            exchange.carrier = None
            exchange.end(error)
            return
        code = error.code if isinstance(error, StreamResetError) else frames.INTERNAL_ERROR
        connection = self._upstream.connection
        if connection.lost and not connection.speaks_http2:
            self._http1()
        refused = code == frames.REFUSED_STREAM
        if (refused or connection.lost) and exchange.repeat(dealt_with=not refused):
            return
        exchange.carrier = None
        exchange.fail(HTTPStatus.BAD_GATEWAY, f"{exchange.upstream_name} broke off: {error}", code)

    def full(self, leg: Leg) -> None:
        self._other(leg).pause_reading()

    def drained(self, leg: Leg) -> None:
        self._other(leg).resume_reading()

    def _other(self, leg: Leg) -> Leg:
        return self._exchange.stream if leg is self._upstream else self._upstream


def _plain(headers: Headers) -> list[Field]:
    return response_fields(item for item in headers if item[0] != b":status")

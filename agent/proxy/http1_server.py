"""A client's connection that speaks HTTP/1.1: its requests, one after the other.

h11 reads and writes the messages. Here they become requests with HTTP/2's headers, as all others are.

The rules:

1. A request waits until the answer before it is whole. Meanwhile no more than one read is kept of it.
2. A request that can be understood in two ways is refused with 400, and the connection closed: a length
   beside chunks, a target that names another host than the field does (RFC 9112 sections 3.2 and 6.1). So is
   one that HTTP/2 could not say, such as one without a host: some apps that speak HTTP/2 would end the
   connection for it on which the requests of all clients are.
3. An answer that is cut off ends the connection without its last chunk, by RST, or without close_notify.
4. A client that ends its side before its answer has come has left (Envoy reads it so, too), unless
   `serves_ended` is set. Else the request of a client that had waited for an event would stay open for ever.
5. A WebSocket that is asked for by Upgrade is an extended CONNECT to us. What its client sends before the
   answer waits. Once the app has agreed, the connection is a tunnel.
6. The head of a request has to be whole `HEAD_TIMEOUT_S` after its first byte.
7. Many requests in one read, or many small chunks, are not dealt with in one turn of the event loop: others
   would have to wait.
8. A CONNECT that `connect` knows is answered with 200, and somebody else has the connection. Where there is
   `tunnel`, it has the connection of every CONNECT, and answers itself.
9. While so much of an answer waits to be sent that the leg is full, the next request waits. A client that
   takes nothing of it for `LAST_BYTES_TIMEOUT_S` is reset.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from enum import Enum
from http import HTTPStatus
from typing import Any

import h11

from agent.proxy import websocket
from agent.proxy.fields import HOP_BY_HOP, Field
from shared.errors import HboneError, StreamResetError
from shared.http2 import frames
from shared.http2.events import Headers
from shared.http2.header_rules import Shape, examine, list_bytes
from shared.net.http2.connection import FAIR_S
from shared.net.legs.contract import Buffer, Leg, RelayEnd
from shared.net.legs.stream import header_value, status_of
from shared.net.legs.tcp_end import LAST_BYTES_TIMEOUT_S

HEAD_TIMEOUT_S = 10.0
"""As Envoy has it in the same place."""

MAX_HEAD_BYTES = 64 << 10
"""Of a request, as over HTTP/2, where each field counts 32 bytes more."""

EARLY_BYTES = 64 << 10
"""Of a request's body that nobody has taken yet."""

DROPPED_BYTES = 256 << 10
"""Of a request's body that comes after its answer: it is read so that the connection can be used again."""

DROP_TIMEOUT_S = 10.0
"""How long that may take."""

DRAIN_IDLE_S = 1.0
"""How long a request may still come in a drain: one that is on its way would be lost if we closed at once."""

_WITHOUT_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


_END_OF_AUTHORITY = re.compile(rb"[/?#]")


class _State(Enum):
    HTTP = "requests and answers"
    TUNNEL = "a WebSocket's bytes"
    OVER = "nothing more"


class Http1Server:
    """A connection on `leg`, as its `RelayEnd`; `serve(request)` gets each of its requests."""

    __slots__ = (
        "_chunked",
        "_connect",
        "_current",
        "_full",
        "_gone",
        "_h11",
        "_idle_timeout_s",
        "_kept_bytes",
        "_last",
        "_leg",
        "_paused",
        "_serve",
        "_serves_ended",
        "_state",
        "_timer",
        "_tunnel",
        "_unasked",
        "_yields",
        "newest",
    )

    def __init__(
        self,
        leg: Leg,
        serve: Callable[[Http1Request], None],
        *,
        serves_ended: bool = False,
        idle_timeout_s: float = 0,
        connect: Callable[[bytes], Callable[[bytes], None] | None] = lambda target: None,
        tunnel: Callable[[bytes, bytes], None] | None = None,
        gone: Callable[[Http1Server], None] = lambda server: None,
    ) -> None:
        """`serves_ended`: a client that has ended its side still gets its answer. A connection without a
        request is closed after `idle_timeout_s` seconds; 0: never. `connect(target)` says who takes the leg
        over, with the first bytes behind a CONNECT to `target`; None: `serve` gets it. `tunnel(target,
        early)` has the connection of a CONNECT, unanswered. `gone(self)` is called once, when there is
        nothing more to come."""
        self._leg = leg
        self._serve = serve
        self._serves_ended = serves_ended
        self._idle_timeout_s = idle_timeout_s
        self._connect = connect
        self._tunnel = tunnel
        self._gone = gone
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._state = _State.HTTP
        self._current: Http1Request | None = None
        self.newest: Http1Request | None = None
        """The request whose answer is under way, or was the last: what waits to be sent counts as its."""
        self._full = False
        self._kept_bytes = 0
        self._chunked = False  # the answer's body
        self._unasked = False  # the client waits for a 100, and nobody has sent one
        self._last = False  # no request follows the one that is under way
        self._paused = False
        self._yields = False  # what has come waits for the next turn of the event loop
        self._timer: asyncio.TimerHandle | None = None
        self._watch_idle()

    @property
    def unsent_bytes(self) -> int:
        """What waits to be sent."""
        return self._leg.buffered_bytes

    @property
    def kept_bytes(self) -> int:
        """What has come of requests that have yet to begin."""
        return self._kept_bytes

    @property
    def is_full(self) -> bool:
        """So much waits that no more should come."""
        return self._full

    def drain(self) -> None:
        """Closes after the next answer, or when no request comes for `DRAIN_IDLE_S`."""
        self._last = True
        if self._current is not None or self._state is not _State.HTTP:
            return
        if self._full:
            self._stop_timer()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DRAIN_IDLE_S, self.close)

    def close(self) -> None:
        """Ends the connection in order; an answer is cut off."""
        if self._state is not _State.OVER:
            self._end()
            self._leg.close()

    def abort(self) -> None:
        """Ends the connection in disorder."""
        self._end()
        self._leg.abort()

    def lost(self) -> None:
        """The connection is gone. May be called though that was known."""
        self._end()
        self._break_request("connection lost")

    def _end(self) -> None:
        self._stop_timer()
        if self._state is not _State.OVER:
            self._state = _State.OVER
            self._gone(self)

    def _break_request(self, text: str) -> None:
        """The connection is over, and so is the request that is under way: not from within a call of its
        carrier's, which has more to do."""
        if self._current is not None:
            asyncio.get_running_loop().call_soon(self._current.broke, text)

    # RelayEnd.

    def received(self, leg: Leg, data: Buffer) -> None:
        if self._state is _State.HTTP:
            self._h11.receive_data(bytes(data))
            if self._current is None:
                self._kept_bytes += len(data)
            self._read()
        elif self._state is _State.TUNNEL and self._current is not None:
            self._current.pushed(data)

    def ended(self, leg: Leg) -> None:
        if self._state is _State.HTTP:
            is_whole = self._current is not None and self._h11.their_state is not h11.SEND_BODY
            if self._serves_ended and is_whole:
                self._last = True
                return
            self.close()
            self._break_request("it closed the connection before its answer was complete")
        elif self._state is _State.TUNNEL and self._current is not None:
            self._current.push_end()

    def failed(self, leg: Leg, error: HboneError) -> None:
        self._end()
        self._break_request(str(error))

    def full(self, leg: Leg) -> None:
        self._full = True
        if self._current is not None:
            self._current.is_full(True)

    def drained(self, leg: Leg) -> None:
        self._full = False
        if self._current is not None:
            self._current.is_full(False)
        elif self._state is _State.HTTP:
            if not self._last:
                self._stop_timer()
            self._read()

    # Requests.

    def _read(self) -> None:
        """Hands on what has come, until more is needed, or a request has to be answered first, or it is the
        others' turn."""
        if self._yields:
            self._plan_reads()
            return
        started = time.monotonic()
        pieces: list[Buffer] = []  # of small chunks, which go on as one
        while self._state is _State.HTTP and not self._yields:
            if self._full if self._current is None else self._h11.their_state is h11.MUST_CLOSE:
                break  # the last request may have something behind it, which is nothing to us
            try:
                event = self._h11.next_event()
            except h11.RemoteProtocolError as error:
                self._refuse(error.error_status_hint)
                return
            is_data = isinstance(event, h11.Data)
            if isinstance(event, h11.Data):
                pieces.append(event.data)
            is_late = time.monotonic() - started > FAIR_S
            current = self._current
            if pieces and current is not None and (is_late or not is_data):
                current.pushed(pieces[0] if len(pieces) == 1 else b"".join(pieces))
                pieces.clear()
            if is_late:
                self._yield()
            if type(event) is h11.Request:
                self._begin(event)
            elif type(event) is h11.EndOfMessage and current is not None:
                current.body_ended(list(event.headers))
            elif not is_data:  # NEED_DATA; PAUSED, for an answer is to come first
                break
        if self._state is _State.HTTP:
            self._plan_reads()

    def _begin(self, event: h11.Request) -> None:
        self._stop_timer()
        self._kept_bytes = 0
        if event.method == b"CONNECT" and (successor := self._connect(event.target)) is not None:
            self._hand_over(successor)
            return
        if event.method == b"CONNECT" and self._tunnel is not None:
            self._give_away(event.target, self._tunnel)
            return
        try:
            headers, bodiless = _headers(event)
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST)
            return
        if list_bytes(headers) > MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        self._current = self.newest = request = Http1Request(
            self, headers, bodiless=bodiless, asked=event.target
        )
        self._serve(request)

    def _hand_over(self, successor: Callable[[bytes], None]) -> None:
        self._h11.next_event()  # the end of its request
        self._send(h11.Response, status_code=HTTPStatus.OK, headers=[], reason=HTTPStatus.OK.phrase)
        early = self._h11.trailing_data[0]
        self._end()
        successor(early)

    def _give_away(self, target: bytes, tunnel: Callable[[bytes, bytes], None]) -> None:
        if type(self._h11.next_event()) is not h11.EndOfMessage:
            self._refuse(
                HTTPStatus.BAD_REQUEST
            )  # a body, which has no meaning there (RFC 9110 section 9.3.6)
            return
        early = bytes(self._h11.trailing_data[0])
        self._end()
        tunnel(target, early)

    def _refuse(self, status: int) -> None:
        """What has come is no request."""
        if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._last = True
            text = f"krun: {_PHRASES.get(status, 'the request is malformed')}\n".encode()
            length = (b"content-length", b"%d" % len(text))
            self.respond(status, [(b"content-type", b"text/plain; charset=utf-8"), length])
            self._send(h11.Data, data=text)
            self._send(h11.EndOfMessage)
            self.close()
        else:
            self.abort()
        self._break_request("its request is malformed")

    def _plan_reads(self) -> None:
        """Reads on, unless nobody wants more of the request's body, or what follows the request."""
        current = self._current
        if current is None:
            waits = self._full
            if not waits:
                self._watch_head()
        elif self._h11.their_state is h11.SEND_BODY:
            waits = current.is_paused
        else:
            self._kept_bytes = len(self._h11.trailing_data[0])
            waits = self._kept_bytes > 0
        waits = waits or self._yields
        if waits is not self._paused:
            self._paused = waits
            if waits:
                self._leg.pause_reading()
            else:
                self._leg.resume_reading()

    def _watch_head(self) -> None:
        """Sets a time for a head that has come in part."""
        if self._timer is None and self._h11.trailing_data[0]:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(HEAD_TIMEOUT_S, self._refuse, HTTPStatus.REQUEST_TIMEOUT)

    def _watch_idle(self) -> None:
        """Sets a time for the next request to come in whole."""
        if self._idle_timeout_s:
            self._timer = asyncio.get_running_loop().call_later(self._idle_timeout_s, self.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # What a request wants.

    def inform(self, status: int, fields: list[Field]) -> None:
        """Sends an interim answer, which HTTP/1.0 does not have."""
        if self._h11.our_state is h11.SEND_RESPONSE and self._h11.their_http_version != b"1.0":
            phrase = _PHRASES.get(status, "")
            self._send(h11.InformationalResponse, status_code=status, headers=fields, reason=phrase)

    def respond(self, status: int, fields: list[Field]) -> None:
        """Sends the head of the answer."""
        has_length = any(name == b"content-length" for name, _ in fields)
        request = self._current
        has_body = status not in _WITHOUT_BODY and not (request and request.is_head)
        self._chunked = has_body and not has_length and self._h11.their_http_version == b"1.1"
        self._unasked = self._h11.they_are_waiting_for_100_continue
        if self._last:
            fields = [*fields, (b"connection", b"close")]
        self._send(h11.Response, status_code=status, headers=fields, reason=_PHRASES.get(status, ""))

    def switch(self, fields: list[Field]) -> None:
        """The connection becomes a tunnel."""
        status = HTTPStatus.SWITCHING_PROTOCOLS
        self._send(h11.InformationalResponse, status_code=status, headers=fields, reason=_PHRASES[status])
        if self._state is _State.HTTP and self._current is not None:
            self._state = _State.TUNNEL
            if early := self._h11.trailing_data[0]:
                self._current.pushed(early)
            self.plan_reads()

    def send(self, data: Buffer) -> None:
        """Sends some of the answer's body, or of the tunnel's bytes."""
        if self._state is _State.TUNNEL:
            self._leg.write(data)
        elif data:
            self._send(h11.Data, data=bytes(data))

    def end(self, trailers: list[Field]) -> None:
        """Ends the answer, or the tunnel's sending side."""
        if self._state is _State.TUNNEL:
            self._leg.write_eof()
        else:
            self._send(h11.EndOfMessage, headers=trailers if self._chunked else [])

    def plan_reads(self) -> None:
        """The request wants no more for now, or wants it again."""
        current = self._current
        if self._state is _State.HTTP:
            self._plan_reads()
        elif self._state is _State.TUNNEL and current is not None:
            self._paused = current.is_paused
            if self._paused:
                self._leg.pause_reading()
            else:
                self._leg.resume_reading()

    def answered(self) -> None:
        """The answer is whole, or the tunnel is over: goes on with the next request, if there may be one."""
        comes = self._h11.their_state is h11.SEND_BODY and not self._unasked
        if self._state is not _State.HTTP or self._last or not (comes or self._is_done()):
            self.close()
        elif comes:
            self._stop_timer()
            self._timer = asyncio.get_running_loop().call_later(DROP_TIMEOUT_S, self.close)
            self._plan_reads()
        else:
            self.next()

    def next(self) -> None:
        """A request and its answer are over."""
        self._stop_timer()
        self._current = None
        if not self.unsent_bytes:
            self.newest = None  # with its headers
        if self._last or not self._is_done():
            self.close()
            return
        self._h11.start_next_cycle()
        if self._full:
            self._watch_reader()
        else:
            self._watch_idle()
        self._yield()  # a client may have sent many requests at once

    def _yield(self) -> None:
        """Goes on in the next turn of the event loop, and reads no more before."""
        if not self._yields:
            self._yields = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._yields = False
        if self._state is _State.HTTP:
            self._read()

    def _watch_reader(self) -> None:
        """Sets a time in which the client has to take some of what waits."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LAST_BYTES_TIMEOUT_S, self._check_reader, self.unsent_bytes)

    def _check_reader(self, before: int) -> None:
        if self.unsent_bytes < before:
            self._watch_reader()
        else:
            self.abort()

    def _is_done(self) -> bool:
        """Whether the connection can be used again."""
        return self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE

    def _send(self, kind: type[Any], **fields: Any) -> None:
        if self._state is not _State.HTTP:
            return
        try:
            data = self._h11.send(kind(**fields))
        except h11.LocalProtocolError:  # what the app says, HTTP/1.1 cannot: nothing may look whole after it
            self.abort()
            self._break_request("the app's answer cannot be sent as HTTP/1.1")
            return
        if data:
            self._leg.write(data)


class Http1Request:
    """A request on an `Http1Server`, and its answer: a `Downstream`."""

    __slots__ = (
        "_answered",
        "_closed",
        "_connection",
        "_dropped_bytes",
        "_early",
        "_end_sent",
        "_ended",
        "_error",
        "_paused",
        "_relay",
        "_websocket_key",
        "asked",
        "bodiless",
        "headers",
        "on_gone",
        "over",
        "trailers",
    )

    def __init__(
        self, connection: Http1Server, headers: Headers, *, bodiless: bool, asked: bytes = b""
    ) -> None:
        self._connection = connection
        self.headers = headers
        self.asked = asked
        """The target as the client wrote it: a path, or a proxy's client a URL."""
        self.bodiless = bodiless
        self.trailers: Headers | None = None
        self.on_gone: Callable[[StreamResetError], None] | None = None
        self.over = False
        self._websocket_key = b""
        if header_value(headers, b":protocol"):
            self._websocket_key = header_value(headers, b"sec-websocket-key")
        self._relay: RelayEnd | None = None
        self._early = bytearray()  # came before join
        self._ended = False  # all has come
        self._error: StreamResetError | None = None  # how it broke before join
        self._paused = False
        self._answered = False
        self._end_sent = False
        self._closed = False  # what still comes is dropped
        self._dropped_bytes = 0

    # What the connection tells.

    @property
    def is_head(self) -> bool:
        """Its answer has no body."""
        return header_value(self.headers, b":method") == b"HEAD"

    @property
    def is_paused(self) -> bool:
        """Nothing more of it is to be read for now."""
        return not self._closed and (self._paused or len(self._early) >= EARLY_BYTES)

    def pushed(self, data: Buffer) -> None:
        """Some of its body, or of the tunnel's bytes, has come."""
        if self._closed:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > DROPPED_BYTES:
                self._connection.close()
        elif self._relay is not None:
            self._relay.received(self, data)
        else:
            self._early += data

    def body_ended(self, trailers: list[Field]) -> None:
        """All of the request has come."""
        if self._closed:
            self._connection.next()
        elif not (self.bodiless or self._websocket_key):
            self.trailers = trailers
            self.push_end()

    def push_end(self) -> None:
        """Nothing more will come."""
        self._ended = True
        if self._relay is not None:
            self._relay.ended(self)

    def broke(self, text: str) -> None:
        """The connection is over."""
        if self.over or self._closed:
            return
        self.over = True
        self._error = error = StreamResetError(text, frames.CANCEL)
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.failed(self, error)
        elif self.on_gone is not None:
            self.on_gone(error)

    def is_full(self, full: bool) -> None:
        """Whether so much waits to be sent that no more should come."""
        if self._relay is not None:
            (self._relay.full if full else self._relay.drained)(self)

    # Downstream.

    @property
    def held_bytes(self) -> int:
        return len(self._early) + self.unsent_bytes

    @property
    def unsent_bytes(self) -> int:
        return self._connection.unsent_bytes if self._is_newest else 0

    @property
    def _is_newest(self) -> bool:
        return not self.over and self._connection.newest is self

    @property
    def buffered_bytes(self) -> int:
        return self.held_bytes

    def join(self, relay: RelayEnd) -> None:
        self._relay = relay
        early, self._early = self._early, bytearray()
        if early:
            relay.received(self, early)
            self._connection.plan_reads()
        if self._connection.is_full:
            relay.full(self)
        if self._ended and self._relay is relay:
            relay.ended(self)
        if self._error is not None:
            relay.failed(self, self._error)

    def leave(self) -> None:
        self._relay = None

    def inform(self, headers: Headers) -> None:
        if not (self.over or self._answered):
            self._connection.inform(status_of(headers), _plain(headers))

    def respond(self, headers: Headers, *, end_stream: bool = False) -> None:
        if self.over:
            return
        self._answered = True
        status, fields = status_of(headers), _plain(headers)
        if self._websocket_key and status == HTTPStatus.OK:
            accept = (b"sec-websocket-accept", websocket.accept(self._websocket_key))
            self._connection.switch(
                [(b"connection", b"Upgrade"), (b"upgrade", websocket.NAME), accept, *fields],
            )
        else:
            self._connection.respond(status, fields)
            if end_stream:
                self.write_eof()

    def write(self, data: Buffer) -> None:
        if not (self.over or self._end_sent):
            self._connection.send(data)

    def write_eof(self) -> None:
        self.end_with_trailers([])

    def end_with_trailers(self, trailers: Headers) -> None:
        if not (self.over or self._end_sent):
            self._end_sent = True
            self._connection.end(list(trailers))

    def pause_reading(self) -> None:
        self._paused = True
        self._connection.plan_reads()

    def resume_reading(self) -> None:
        self._paused = False
        self._connection.plan_reads()

    def close(self) -> None:
        if self._closed or self.over:
            return
        self.write_eof()
        self._closed = True
        self._relay = None
        self._early.clear()
        if not self.over:
            self._connection.answered()

    def abort(self) -> None:
        self.reset(frames.CANCEL)

    def reset(self, code: int) -> None:
        self._relay = None
        if self._is_newest:  # else there is nothing left of it
            self._connection.abort()
        self.over = True


# Headers.


def _plain(headers: Headers) -> list[Field]:
    return [item for item in headers if item[0] != b":status"]


def _headers(event: h11.Request) -> tuple[Headers, bool]:
    """A request's headers as HTTP/2 has them, and whether it has no body. Raises ValueError if it can be
    understood in two ways, or HTTP/2 cannot say it."""
    fields: list[Field] = list(event.headers)
    dropped = {b"host", *HOP_BY_HOP}
    dropped.update(*(_tokens(value) for name, value in fields if name == b"connection"))
    lengths = [value for name, value in fields if name == b"content-length"]
    is_chunked = any(name == b"transfer-encoding" for name, _ in fields)
    if is_chunked and lengths:
        raise ValueError("a length beside chunks")
    bodiless = not (is_chunked or any(map(int, lengths)))
    host = header_value(fields, b"host")
    headers = [(b":method", event.method), *_target(event.method, event.target, host)]
    if event.method == b"GET" and websocket.NAME in _tokens(header_value(fields, b"upgrade")):
        names = {name for name, _ in fields} - dropped
        is_asked = any(b"upgrade" in _tokens(value) for name, value in fields if name == b"connection")
        if not (bodiless and is_asked and b"sec-websocket-key" in names):
            raise ValueError("no WebSocket's request")
        headers[0] = (b":method", b"CONNECT")
        headers.insert(1, (b":protocol", websocket.NAME))
        bodiless = False  # the tunnel's bytes follow
        dropped.add(b"content-length")
    headers += [item for item in fields if item[0] not in dropped]
    if any(b"trailers" in _tokens(value) for name, value in fields if name == b"te"):
        headers.append((b"te", b"trailers"))
    block = examine(headers)
    if block.shape is not Shape.REQUEST:
        raise ValueError(block.fault)
    return block.fields, bodiless


def _target(method: bytes, target: bytes, host: bytes) -> list[Field]:
    """What a request's target says beside the `host` field (RFC 9112 section 3.2)."""
    if method == b"CONNECT":
        return [(b":authority", target), (b"host", host)]
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return [(b":scheme", b"https"), (b":path", target), (b":authority", host)]
    authority = _END_OF_AUTHORITY.split(rest, maxsplit=1)[0]
    path = rest[len(authority) :]
    path = path if path.startswith(b"/") else b"/" + path
    own = [(b"host", host)] if host else []  # which has to be the same
    return [(b":scheme", b"https"), (b":path", path), (b":authority", authority), *own]


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip().lower() for token in value.split(b",")]
